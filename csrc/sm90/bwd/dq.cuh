// dQ is summed over the key tiles in float32, in memory. A consumer warpgroup leaves a row tile, or its part of one, in
// shared memory and goes on; a thread of the producer warpgroup adds it there by bulk reductions. The sums lie in the
// order of the WGMMA fragments, four of a thread together. Once all key tiles of a head have added, consumers turn the
// sums into 16-bit rows, while dK and dV of a later key tile leave: most are still in L2, and no kernel has to follow.
//
// The first key tile that visits a row tile stores and the others wait for it: nobody has to clear the sums first. In the
// deterministic mode every key tile waits for the one before it, so that the sum has the same bits each time. A CTA waits only for tasks
// drawn before its own. (That a share of dQ has become rows is counted as its CTA loads for the task after the next one:
// loads wait for no other CTA.)
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

#include "../../core/registers.cuh"
#include "task.cuh"
#include "scores.cuh"
#include "traits.cuh"
#include "../pipeline.cuh"

namespace flash_cute::sm90::bwd {

// A warpgroup's buffers of dQ are its own again once what its epilogue left there has gone.
CUTE_DEVICE void wait_results_read() {
  int const thread = consumer_thread();
  if (thread % 128 == 0) tma_store_wait<0>();
  named_sync(kResults + thread / 128, 128);
}

// The turns of the key tiles at a row tile: the semaphore counts those that have added.
CUTE_DEVICE void wait_turn(int const* semaphore, int turn) {
  int arrived;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(semaphore) : "memory");
  } while (arrived < turn);
  asm volatile("fence.proxy.async;" ::: "memory");  // what the acquire saw comes before bulk copies
}

CUTE_DEVICE void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

CUTE_DEVICE void end_turn(int* semaphore) {
  bulk_wait_written();
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(semaphore) : "memory");
}

// Of a key head, of all batches: how often the adding threads have been done with a key tile, twice each, and then how
// many shares of its dQ are rows.
CUTE_DEVICE int* head_counter(KernelArgs const& args, int head) { return args.params.counters + 1 + head; }

// Of a split key tile: 1 once key tile 0 has stored there, and kPartArrivals for each part that is in memory, its dQ
// added; see bwd_split.cuh.
CUTE_DEVICE int* part_counter(KernelArgs const& args, int split) { return args.params.semaphores + split; }
template <class Traits>
constexpr int kPartArrivals = Traits::kConsumerThreads / 32 + 2;

// For the parts that the task takes in; or, where it is one, until there is a place for it.
template <class Traits>
CUTE_DEVICE void wait_parts(KernelArgs const& args, Task const volatile& task) {
  wait_turn(part_counter(args, task.split), 1 + max(0, task.parts) * kPartArrivals<Traits>);
}

// Does the warpgroup compute dQ, or its share of dQ, of the step?
template <class Traits>
CUTE_DEVICE bool computes_dq(int step, int warpgroup) {
  return !Traits::kTurns || step % 2 == warpgroup;
}

// The first such step from `step` on.
template <class Traits>
CUTE_DEVICE int next_dq_step(int step, int warpgroup) {
  return computes_dq<Traits>(step, warpgroup) ? step : step + 1;
}

// Where the ring of the warpgroup's buffers stands in such a step.
template <class Traits>
CUTE_DEVICE PipelineState<Traits::kDqBuffers> dq_state(int step) {
  return {step % Traits::kDqBuffers, (step >> 1) & 1};
}

// What a warpgroup has of dQ of a step to shared memory, in fragment order: the sums' offset i + 4 * 128 * j is
// register 4 * j + i % 4 of thread i / 4.
template <class Traits, class Accumulator>
CUTE_DEVICE void store_dq(typename Traits::SharedStorage& smem, int warpgroup, int step,
                          Accumulator const& tdQrdQ) {  // (MMA, MMA_M, MMA_D)
  constexpr int kPerThread = Traits::kDqElements / 128;
  static_assert(decltype(size(tdQrdQ))::value == kPerThread);
  auto const state = dq_state<Traits>(step);
  auto* const place = reinterpret_cast<float4*>(smem.dq[warpgroup][state.stage]) + consumer_thread() % 128;
  smem.dq_pipeline[warpgroup].wait_empty(state);  // the sums of two steps before have been read
  CUTE_UNROLL
  for (int i = 0; i < kPerThread; i += 4) {
    place[i * 32] = make_float4(tdQrdQ(i), tdQrdQ(i + 1), tdQrdQ(i + 2), tdQrdQ(i + 3));
  }
}

// Makes it known, after a fence for the async proxy.
template <class Traits>
CUTE_DEVICE void publish_dq(typename Traits::SharedStorage& smem, int warpgroup, int step) {
  smem.dq_pipeline[warpgroup].arrive_full(dq_state<Traits>(step));
}

// Adds what store_dq leaves to memory: of two threads one the even steps, the other the odd ones, so that an ordered
// sum's way to memory and the wait for the turn at the next row tile overlap.
template <class Traits, int kParity>
CUTE_DEVICE void add_dq(KernelArgs const& args, typename Traits::SharedStorage& smem) {
  constexpr int kBytes = Traits::kDqElements * sizeof(float);
  BwdParams const& params = args.params;
#pragma unroll 1
  for (int draws = 0;; ++draws) {
    smem.task_pipeline.wait_full(at_step(draws));
    auto task = [&]() -> Task const volatile& { return smem.task[opaque(draws) & 1]; };
    if (task().dq_begin < 0) break;
    RowTile row_tile{task().first.m_block, task().first.head};
#pragma unroll 1
    for (int count = task().begin; count < task().end; ++count, row_tile.advance(args.params.group)) {
      if (count % 2 != kParity) continue;
      int const head = task().batch * params.heads_q + task().head_kv * params.group + row_tile.head;
      int const index = head * params.m_blocks + row_tile.m_block;
      // Of this key tile among those that visit the row tile. Computed at each use: these threads have 24 registers.
      auto is_first = [&] {
        return first_column(params, row_tile.m_block * Traits::kBlockM) >= task().n_block * Traits::kBlockN;
      };
      auto turn = [&] {
        return task().n_block - first_column(params, row_tile.m_block * Traits::kBlockM) / Traits::kBlockN;
      };
      auto const state = dq_state<Traits>(count);
#pragma unroll 1
      for (int warpgroup = 0; warpgroup < Traits::kWarpgroups; ++warpgroup) {
        if (!computes_dq<Traits>(kParity, warpgroup)) continue;
        smem.dq_pipeline[warpgroup].wait_full(state);
        int64_t const offset = Traits::kTurns ? 0 : warpgroup * Traits::kDqElements;
        float* const sums = params.dq_acc + int64_t{index} * Traits::kQElements + offset;
        uint32_t const source = cast_smem_ptr_to_uint(smem.dq[warpgroup][state.stage]);
        if (is_first()) {
          asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(sums), "r"(source),
                       "n"(kBytes)
                       : "memory");
        } else {
          if (warpgroup == 0 || Traits::kTurns) {
            wait_turn(params.semaphores + index, params.deterministic ? turn() : 1);
          }
          asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(sums),
                       "r"(source), "n"(kBytes)
                       : "memory");
        }
        tma_store_arrive();
        tma_store_wait<0>();  // shared memory has been read
        smem.dq_pipeline[warpgroup].arrive_empty(state);
      }
      if (params.deterministic || is_first()) end_turn(params.semaphores + index);
    }
    if (task().n_block >= 0) {
      int* done = head_counter(args, task().batch * params.heads_kv + task().head_kv);
      if (task().parts != 0) wait_parts<Traits>(args, task());
      if (task().parts < 0) done = part_counter(args, task().split);
      end_turn(done);
    }
    smem.task_pipeline.arrive_empty(at_step(draws));
  }
}

// Tells the consumers that a task's sums are complete, and that they may store its part or take its parts in.
template <class Traits>
CUTE_DEVICE void watch_sums(KernelArgs const& args, typename Traits::SharedStorage& smem) {
#pragma unroll 1
  for (int draws = 0;; ++draws) {
    smem.task_pipeline.wait_full(at_step(draws));
    Task const volatile& task = smem.task[draws & 1];
    if (task.dq_begin < 0) break;
    if (task.dq_begin < task.dq_end) wait_turn(head_counter(args, task.dq_head), 2 * args.params.n_blocks);
    if (task.parts != 0) wait_parts<Traits>(args, task);
    if (task.parts < 0) {  // the heads whose sums the part overwrites
      int const row_tiles = args.params.m_blocks * args.params.group;
      int const begin = task.range * Traits::kPartRowTiles, end = begin + Traits::kPartRowTiles;
      int const shares = ceil_div(row_tiles, args.params.task_order.dq_share);
      for (int head = begin / row_tiles; head * row_tiles < end; ++head) {
        wait_turn(head_counter(args, head), 2 * args.params.n_blocks + shares);
      }
    }
    smem.sums_pipeline.publish(at_step(draws));
    smem.task_pipeline.arrive_empty(at_step(draws));
  }
}

// The sums of row tiles to 16-bit rows, by the consumers' threads, in two halves: between load and store passes the
// time that the sums need to come.
template <class Traits>
class DqRows {
 public:
  // In flight together: what a task has of dQ where each key head has one query head.
  static constexpr int kRowTiles = Traits::kBlockM == 64 ? 2 : 1;

  // The row tiles [begin, end), at most kRowTiles.
  CUTE_DEVICE void load(KernelArgs const& args, int begin, int end) {
    CUTE_UNROLL
    for (int t = 0; t < kRowTiles; ++t) {
      CUTE_UNROLL
      for (float4& four : fours_[t]) four = make_float4(0.f, 0.f, 0.f, 0.f);
      if (begin + t >= end) continue;
      int const m_block = (begin + t) % args.params.m_blocks;
      KeyTiles const visiting = visiting_key_tiles<Traits::kBlockM, Traits::kBlockN>(args.params, m_block);
      if (visiting.begin == visiting.end) continue;  // there are no sums
      float const* const sums = args.params.dq_acc + int64_t{begin + t} * Traits::kQElements + 4 * consumer_thread();
      CUTE_UNROLL
      for (int i = 0; i < kFours; ++i) {
        float4& four = fours_[t][i];
        asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                     : "l"(sums + i * 4 * Traits::kConsumerThreads)
                     : "memory");
      }
    }
  }

  CUTE_DEVICE void store(KernelArgs const& args, int begin, int end) const {
    CUTE_UNROLL
    for (int t = 0; t < kRowTiles; ++t) {
      if (begin + t >= end) break;
      int const head = (begin + t) / args.params.m_blocks, m_block = begin + t - head * args.params.m_blocks;
      BwdParams const& params = args.params;
      if ((m_block + 1) * Traits::kBlockM > params.len_q || params.head_dim < Traits::kHeadDim) {
        store_row_tile<true>(params, fours_[t], head, m_block);
      } else {
        store_row_tile<false>(params, fours_[t], head, m_block);
      }
    }
  }

 private:
  static constexpr int kFours = Traits::kQElements / Traits::kConsumerThreads / 4;

  template <bool kClipped>
  CUTE_DEVICE static void store_row_tile(BwdParams const& params, float4 const (&fours)[kFours], int head,
                                         int m_block) {
    using Element = typename Traits::Element;
    // Register 4 * j + r of thread t in store_dq is of row 64 * (j / (D / 8)) + 16 * (t / 32) + t % 32 / 4 +
    // 8 * (r / 2) and column 8 * (j % (D / 8)) + 2 * (t % 4) + r % 2; a warpgroup has every other j here.
    int const thread = consumer_thread();
    int const row = m_block * Traits::kBlockM + thread % 128 / 32 * 16 + thread % 32 / 4;
    int const column = thread / 128 * 8 + thread % 4 * 2;
    int const batch = head / params.heads_q;
    int64_t const stride = params.dq_strides.row;
    auto* const place = static_cast<Element*>(params.dq) + batch * params.dq_strides.batch +
                        (head - batch * params.heads_q) * params.dq_strides.head + row * stride + column;
    CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) {
      int const further_row = 16 * i / Traits::kHeadDim * 64, further_column = 16 * i % Traits::kHeadDim;
      auto put = [&](int row_below, float left, float right) {
        if (kClipped && (row + row_below >= params.len_q || column + further_column >= params.head_dim)) return;
        cutlass::Array<float, 2> const scaled{left * params.scale, right * params.scale};
        auto const pair = cutlass::NumericArrayConverter<Element, float, 2>{}(scaled);
        *reinterpret_cast<uint32_t*>(place + row_below * stride + further_column) =
            reinterpret_cast<uint32_t const&>(pair);
      };
      put(further_row, fours[i].x, fours[i].y);
      put(further_row + 8, fours[i].z, fours[i].w);
    }
  }

  float4 fours_[kRowTiles][kFours];
};

}  // namespace flash_cute::sm90::bwd
