// dQ is accumulated over the key tiles in float32, in global memory. A consumer warpgroup stores dQ of a row tile, or
// its half of one, in shared memory and goes on; a thread of the producer warpgroup adds it to global memory by bulk
// reductions. The sums are stored in WGMMA fragment order, four registers of a thread together. Once all key tiles of a
// head have added, consumers convert the sums to 16-bit rows, as shares of later tasks, while dK and dV of a later key
// tile are being stored: most sums are then still in L2, and no further kernel is needed (dq_rows.cuh).
//
// The first key tile that visits a row tile stores, and the others wait for it, so that no kernel has to clear the
// sums. In the deterministic mode every key tile waits for the one before it, so that dQ is bitwise reproducible. A CTA
// waits only for tasks with lower tickets. (A share is counted as converted by the producer thread, when it draws the
// second task after it: loads wait for no other CTA.)
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/memory_order.cuh"
#include "core/registers.cuh"
#include "dq_queue.cuh"
#include "sm90/backward/common/place.cuh"
#include "task.cuh"
#include "sm90/backward/common/scores.cuh"
#include "traits.cuh"
#include "sm90/common/pipeline.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

// Waits until the TMA stores of the last epilogue have read dK and dV from the warpgroup's dQ buffers, which may then
// be overwritten. One thread has issued them and waits for them; the barrier tells the other threads of the warpgroup.
CUTE_DEVICE void wait_results_read() {
  int const thread = consumer_thread();
  if (thread % 128 == 0) tma_store_wait<0>();
  named_sync(kResults + thread / 128, 128);
}

// Spins until a counter in global memory has reached `count`; count_up increments it. The semaphore of a row tile
// counts the key tiles that have added, or, without the deterministic mode, only the first one, which has stored.
CUTE_DEVICE void wait_for_count(int const* counter, int count) {
  while (load_acquire(counter) < count) continue;
  asm volatile("fence.proxy.async;" ::: "memory");  // orders the bulk copies that follow after the acquire
}

// Bulk copies of shared memory at `source` to sums in global memory.
template <int kBytes>
CUTE_DEVICE void bulk_store(float* sums, uint32_t source) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(sums), "r"(source), "n"(kBytes)
               : "memory");
}
template <int kBytes>
CUTE_DEVICE void bulk_add(float* sums, uint32_t source) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(sums), "r"(source),
               "n"(kBytes)
               : "memory");
}

CUTE_DEVICE void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// By the thread that has issued the bulk copies: waits until they have been written, then counts.
CUTE_DEVICE void count_up(int* counter) {
  bulk_wait_written();
  asm volatile("fence.proxy.async;" ::: "memory");
  increment_release(counter);
}

// The progress of a KV head (over all batches): each of the two adding threads counts each of its key tiles, so that
// the sums are complete at 2 * n_blocks; after that, each share of dQ that has been converted counts 1.
CUTE_DEVICE int* head_counter(KernelArgs const& args, int head) { return args.params.counters + 1 + head; }

// The counter of a split key tile: 1 once key tile 0 has stored to the row tile whose semaphore this is, and
// kPartArrivals more for each part that is in global memory with its dQ added; see split.cuh.
CUTE_DEVICE int* part_counter(KernelArgs const& args, int split) { return args.params.semaphores + split; }
template <class Traits>
constexpr int kPartArrivals = Traits::kConsumerThreads / 32 + 2;

// Waits for all parts that the task merges. If the task is itself a part, waits for the 1 that key tile 0 leaves in the
// counter.
template <class Traits>
CUTE_DEVICE void wait_parts(KernelArgs const& args, Task const volatile& task) {
  wait_for_count(part_counter(args, task.split), 1 + max(0, task.parts) * kPartArrivals<Traits>);
}

// Whether the warpgroup computes dQ, or its half of dQ, of the step.
template <class Traits>
CUTE_DEVICE bool computes_dq(int step, int warpgroup) {
  return !Traits::kAlternates || step % 2 == warpgroup;
}

// The first such step at or after `step`.
template <class Traits>
CUTE_DEVICE int next_dq_step(int step, int warpgroup) {
  return computes_dq<Traits>(step, warpgroup) ? step : step + 1;
}

// The state of the warpgroup's ring of dQ buffers in such a step.
template <class Traits>
CUTE_DEVICE PipelineState<Traits::kDqBarriers> dq_state(int step) {
  return {step % Traits::kDqBarriers, (step >> 1) & 1};
}

// Waits until the adding thread has read what the buffer for a step's dQ held before: dQ of two steps before or, where
// all steps have one buffer, of the step before, which is the wait of the next step.
template <class Traits>
CUTE_DEVICE void wait_dq_buffer(typename Traits::SharedStorage& smem, int warpgroup, int step) {
  smem.dq_pipeline[warpgroup].wait_empty(dq_state<Traits>(Traits::kByColumns ? step + 1 : step));
}

// Stores a warpgroup's dQ of a step in shared memory, in fragment order: offset i + 4 * 128 * j (i < 512) holds
// register 4 * j + i % 4 of thread i / 4. `kFirst`: the registers are those from this one on.
template <class Traits, int kFirst = 0, class Accumulator>
CUTE_DEVICE void store_dq(typename Traits::SharedStorage& smem, int warpgroup, int step,
                          Accumulator const& tdQrdQ) {  // (MMA, MMA_M, MMA_D)
  constexpr int kPerThread = decltype(size(tdQrdQ))::value;
  static_assert(kFirst + kPerThread <= Traits::kDqElements / 128);
  auto const state = dq_state<Traits>(step);
  int const number = state.stage % Traits::kDqBuffers;
  auto* const buffer = reinterpret_cast<float4*>(smem.dq[warpgroup][number]) + consumer_thread() % 128;
  wait_dq_buffer<Traits>(smem, warpgroup, step);
  CUTE_UNROLL
  for (int i = 0; i < kPerThread; i += 4) {
    buffer[(kFirst + i) * 32] = make_float4(tdQrdQ(i), tdQrdQ(i + 1), tdQrdQ(i + 2), tdQrdQ(i + 3));
  }
}

// Hands the stored dQ to the adding thread. After a fence for the async proxy, which reads it.
template <class Traits>
CUTE_DEVICE void publish_dq(typename Traits::SharedStorage& smem, int warpgroup, int step) {
  smem.dq_pipeline[warpgroup].arrive_full(dq_state<Traits>(step));
}

// All of a key tile's dQ is in the sums. `task()`: the task, of the last argument's type.
template <class Traits, class ReadTask>
CUTE_DEVICE void end_key_tile(KernelArgs const& args, ReadTask const& task, Task const&) {
  int* done = head_counter(args, task().batch * args.params.heads_kv + task().head_kv);
  if (task().parts != 0) wait_parts<Traits>(args, task());
  if (task().parts < 0) done = part_counter(args, task().split);
  count_up(done);
}
template <class Traits, class ReadTask>
CUTE_DEVICE void end_key_tile(KernelArgs const& args, ReadTask const& task, SequenceTask const&) {
  bulk_wait_written();
  asm volatile("fence.proxy.async;" ::: "memory");
  count_key_tile<Traits>(args.params, task());
}

// Adds dQ from shared memory to the sums in global memory. One thread handles the even steps, another the odd ones, so
// that the latency of an ordered add overlaps with the wait for the order at the next row tile.
template <class Traits, int kParity>
CUTE_DEVICE void add_dq(KernelArgs const& args, typename Traits::SharedStorage& smem) {
  constexpr int kBytes = Traits::kDqElements * sizeof(float);
  BwdParams const& params = args.params;
#pragma unroll 1
  for (int task_number = 0;; ++task_number) {
    smem.task_pipeline.wait_full(at_step(task_number));  // the producer has written the task
    auto task = [&]() -> typename Traits::Task const volatile& { return smem.task[opaque(task_number) & 1]; };
    if (task().dq_begin < 0) break;
    auto lengths = [&]() -> decltype(auto) { return lengths_of(params, task()); };
    RowTile row_tile{task().first.m_block, task().first.head};
#pragma unroll 1
    for (int count = task().begin; count < task().end; ++count, row_tile.advance(args.params.heads_per_kv, task())) {
      if (count % 2 != kParity) continue;
      int const index = row_tile_index<Traits>(params, task(), row_tile);
      // Whether this key tile is the first that visits the row tile, and its rank among those that do. Recomputed at
      // each use: these threads have 24 registers.
      auto is_first = [&] {
        return first_column(lengths(), row_tile.m_block * Traits::kBlockM) >= task().n_block * Traits::kBlockN;
      };
      auto order = [&] {
        return task().n_block - first_column(lengths(), row_tile.m_block * Traits::kBlockM) / Traits::kBlockN;
      };
      auto const state = dq_state<Traits>(count);
#pragma unroll 1
      for (int i = 0; i < Traits::kWarpgroups; ++i) {
        int const warpgroup = Traits::kByColumns ? Traits::kWarpgroups - 1 - i : i;  // in the order of their dQ
        if (!computes_dq<Traits>(kParity, warpgroup)) continue;
        smem.dq_pipeline[warpgroup].wait_full(state);  // the warpgroup's four warps have stored dQ of this step
        int64_t const offset = Traits::kAlternates ? 0 : warpgroup * Traits::kDqElements;
        float* const sums = params.dq_acc + int64_t{index} * Traits::kQElements + offset;
        uint32_t const source = cast_smem_ptr_to_uint(smem.dq[warpgroup][state.stage % Traits::kDqBuffers]);
        if (is_first()) {
          bulk_store<kBytes>(sums, source);
        } else {
          if (i == 0 || Traits::kAlternates) {
            wait_for_count(params.semaphores + index, params.deterministic ? order() : 1);
          }
          bulk_add<kBytes>(sums, source);
        }
        tma_store_arrive();
        tma_store_wait<0>();  // the bulk copy has read shared memory, which the warpgroup may overwrite
        smem.dq_pipeline[warpgroup].arrive_empty(state);
      }
      if (params.deterministic || is_first()) count_up(params.semaphores + index);
    }
    if (task().n_block >= 0) {
      end_key_tile<Traits>(args, task, smem.task[0]);
    }
    smem.task_pipeline.arrive_empty(at_step(task_number));
  }
}

// Waits for other CTAs on behalf of the consumers, and tells them through sums_pipeline that the sums of a task's dQ
// share are complete, and that they may store its part or merge its parts.
template <class Traits>
CUTE_DEVICE void watch_sums(KernelArgs const& args, typename Traits::SharedStorage& smem) {
#pragma unroll 1
  for (int task_number = 0;; ++task_number) {
    smem.task_pipeline.wait_full(at_step(task_number));  // the producer has written the task
    Task const volatile& task = smem.task[task_number & 1];
    if (task.dq_begin < 0) break;
    if (task.dq_begin < task.dq_end) wait_for_count(head_counter(args, task.dq_head), 2 * args.params.n_blocks);
    if (task.parts != 0) wait_parts<Traits>(args, task);
    if (task.parts < 0) {  // all shares of the heads whose sums the part overwrites have been converted
      int const row_tiles = args.params.m_blocks * args.params.heads_per_kv;
      int const begin = task.range * Traits::kPartRowTiles, end = begin + Traits::kPartRowTiles;
      int const shares = ceil_div(row_tiles, args.params.task_order.dq_share);
      for (int head = begin / row_tiles; head * row_tiles < end; ++head) {
        wait_for_count(head_counter(args, head), 2 * args.params.n_blocks + shares);
      }
    }
    smem.sums_pipeline.publish(at_step(task_number));
    smem.task_pipeline.arrive_empty(at_step(task_number));
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_memory
