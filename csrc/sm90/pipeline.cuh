// How the producer and the consumers hand buffers to each other, and warpgroups take turns.
//
// A Pipeline is a ring of kStages shared-memory buffers with two mbarriers each: Full (a TMA load has
// landed; one arrival by the producer plus the bytes) and Empty (all consumer warps are done reading). A
// PipelineState is one side's position in the ring; a barrier's phase flips each time the ring wraps.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/tensor.hpp>

namespace flash_cute::sm90 {

using namespace cute;

// The race test's build is late, by up to a microsecond at random, wherever a buffer or a turn changes hands.
CUTE_DEVICE void jitter() {
#ifdef FLASH_CUTE_RACE_TEST
  uint32_t clock;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
  __nanosleep((clock * 2654435761u) >> 22);
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
  CUTE_DEVICE PipelineState previous() const {
    return stage == 0 ? PipelineState{kStages - 1, phase ^ 1} : PipelineState{stage - 1, phase};
  }
};

// A ring of two at its i-th use.
CUTE_DEVICE PipelineState<2> at_step(int i) { return {i & 1, (i >> 1) & 1}; }

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

  // Producer. A ring starts empty: the first wait, on the phase before 0, falls through.
  CUTE_DEVICE void wait_empty(PipelineState<kStages> state) {
    wait_barrier(empty[state.stage], state.phase ^ 1);
    jitter();
  }
  CUTE_DEVICE uint64_t* expect(PipelineState<kStages> state, uint32_t bytes) {
    set_barrier_transaction_bytes(full[state.stage], bytes);
    return &full[state.stage];
  }

  // Consumers: every thread waits, one lane a warp releases. All lanes have waited by then: something has synced them.
  CUTE_DEVICE void wait_full(PipelineState<kStages> state) {
    wait_barrier(full[state.stage], state.phase);
    jitter();
  }
  CUTE_DEVICE void release(PipelineState<kStages> state) {
    jitter();
    if (elect_lane()) arrive_barrier(empty[state.stage]);
  }

  // Where warps produce and one thread consumes.
  CUTE_DEVICE void arrive_full(PipelineState<kStages> state) {
    jitter();
    __syncwarp();
    if (elect_lane()) arrive_barrier(full[state.stage]);
  }
  // One thread produces without TMA.
  CUTE_DEVICE void publish(PipelineState<kStages> state) {
    jitter();
    arrive_barrier(full[state.stage]);
  }
  CUTE_DEVICE void arrive_empty(PipelineState<kStages> state) {
    jitter();
    arrive_barrier(empty[state.stage]);
  }

 private:
  CUTE_DEVICE static bool elect_lane() { return threadIdx.x % 32 == 0; }
};

// Hardware barriers (bar.sync) by name; 0 is __syncthreads.
enum NamedBarrier : int {
  kTurn = 1,      // + warpgroup: it is this warpgroup's turn at the tensor cores
  kMerge = 5,     // + warpgroup, forward: a share of a part has been taken in
  kHalfStep = 1,  // backward: warpgroup 0 is half a step ahead
  kResults = 2,   // + warpgroup, backward: dK and dV are complete in shared memory, or have left it
};

CUTE_DEVICE void named_sync(int barrier, int threads) {
  jitter();
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

CUTE_DEVICE void named_arrive(int barrier, int threads) {
  jitter();
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The ring of turns: a warpgroup issues its two products of a step together, then hands on. The tensor
// cores so run one warpgroup's products while the others are in their softmax.
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
