// Synchronisation between producer and consumers (ring buffers) and between warpgroups (turns).
//
// A Pipeline is the barriers of a ring buffer of kStages stages in shared memory, two mbarriers per stage: Full (a TMA
// load has landed; one arrival by the producer plus the bytes) and Empty (all consumer warps have finished reading). A
// PipelineState is one side's position in the ring; a barrier's phase flips each time the ring wraps.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/tensor.hpp>

namespace flash_cute::sm90 {

using namespace cute;

// In the race test's build, delays the caller by a random time of up to a microsecond. Called wherever a buffer or a
// turn changes hands, so that a missing wait shows as a wrong result.
//
// Each warp draws from a number of its own in global memory. The clock would do, but for ptxas 13.0: behind an ISETP
// and a read of the clock it used the predicate 10 cycles after the ISETP, which sets it after 13.
#ifdef FLASH_CUTE_RACE_TEST
constexpr int kJitterStates = 1 << 14;
static __device__ uint32_t jitter_states[kJitterStates];
#endif
CUTE_DEVICE void jitter() {
#ifdef FLASH_CUTE_RACE_TEST
  int const warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  uint32_t volatile& state = jitter_states[warp % kJitterStates];
  uint32_t const next = state * 1664525u + 1013904223u + warp;
  state = next;
  __nanosleep(next >> 22);
#endif
}

template <int kStages>
struct PipelineState {
  int stage = 0;
  int phase = 0;

  CUTE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The state of a ring of two stages at its use number i.
CUTE_DEVICE PipelineState<2> at_step(int i) { return {i & 1, (i >> 1) & 1}; }
// Of any ring.
template <int kStages>
CUTE_DEVICE PipelineState<kStages> at_use(int i) {
  unsigned const use = i;
  return {int(use % kStages), int(use / kStages & 1)};
}

template <int kStages>
struct Pipeline {
  uint64_t full[kStages];
  uint64_t empty[kStages];

  CUTE_DEVICE void init(int consumer_arrivals, int producer_arrivals = 1) {
    for (int i = 0; i < kStages; ++i) {
      initialize_barrier(full[i], producer_arrivals);
      initialize_barrier(empty[i], consumer_arrivals);
    }
  }

  // Producer: waits until all consumers have released the stage. A ring starts empty: the first wait on each stage, for
  // the phase before phase 0, falls through.
  CUTE_DEVICE void wait_empty(PipelineState<kStages> state) {
    wait_barrier(empty[state.stage], state.phase ^ 1);
    jitter();
  }
  CUTE_DEVICE uint64_t* expect(PipelineState<kStages> state, uint32_t bytes) {
    set_barrier_transaction_bytes(full[state.stage], bytes);
    return &full[state.stage];
  }

  // Consumers: every thread waits; one lane per warp releases. All its lanes must have passed their wait by then, so
  // that a warp-wide instruction (WGMMA, a shuffle, __syncwarp) must come between.
  CUTE_DEVICE void wait_full(PipelineState<kStages> state) {
    wait_barrier(full[state.stage], state.phase);
    jitter();
  }
  CUTE_DEVICE void release(PipelineState<kStages> state) { release_stage(state.stage); }
  CUTE_DEVICE void release_stage(int stage) {  // its phase does not matter
    jitter();
    if (elect_lane()) arrive_barrier(empty[stage]);
  }

  // Warps as producers without TMA: one arrival per warp, for the writes of all its lanes.
  CUTE_DEVICE void arrive_full(PipelineState<kStages> state) {
    jitter();
    __syncwarp();
    if (elect_lane()) arrive_barrier(full[state.stage]);
  }
  // One thread as producer without TMA.
  CUTE_DEVICE void publish(PipelineState<kStages> state) {
    jitter();
    arrive_barrier(full[state.stage]);
  }
  // One thread as consumer.
  CUTE_DEVICE void arrive_empty(PipelineState<kStages> state) {
    jitter();
    arrive_barrier(empty[state.stage]);
  }

 private:
  CUTE_DEVICE static bool elect_lane() { return threadIdx.x % 32 == 0; }
};

// Named barriers (bar.sync); 0 is __syncthreads.
enum ForwardBarrier : int {
  kTurn = 1,   // + warpgroup: it is this warpgroup's turn to issue WGMMAs
  kMerge = 5,  // + warpgroup: all its threads have reached the same point of a merge
  kVote = 9,   // + warpgroup: its warps decide together
};
enum BackwardBarrier : int {
  kHalfStep = 1,  // warpgroup 0 is half a step ahead
  kResults = 2,   // + warpgroup: its gradients are complete in shared memory, or have been read from it
};

CUTE_DEVICE void named_sync(int barrier, int threads) {
  jitter();
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

CUTE_DEVICE void named_arrive(int barrier, int threads) {
  jitter();
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Ping-pong: the warpgroups take turns to issue the two GEMMs of a step, so that the tensor cores run one warpgroup's
// GEMMs while the others compute softmax. Each barrier has 256 threads: the warpgroup that waits for its turn (sync)
// and the one that hands it on (arrive).
template <int kWarpgroups, bool kEnabled>
struct TurnRing {
  CUTE_DEVICE static void start(int warpgroup) {
    if (kEnabled && warpgroup == kWarpgroups - 1) named_arrive(kTurn, 256);  // the first turn is warpgroup 0's
  }
  CUTE_DEVICE static void take(int warpgroup) {
    if constexpr (kEnabled) named_sync(kTurn + warpgroup, 256);
  }
  CUTE_DEVICE static void hand_on(int warpgroup) {
    if constexpr (kEnabled) named_arrive(kTurn + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1), 256);
  }
};

}  // namespace flash_cute::sm90
