// The Hopper backward: a CTA takes a tile of keys, passes over the row tiles of all query heads that read them, writes
// their dK and dV and some rows of an earlier head's dQ, and takes another. Two consumer warpgroups, each with 64 of
// the keys; in a third warpgroup one thread issues all loads, two add dQ to memory, and one watches for complete sums.
#pragma once

#include "bwd_args.cuh"
#include "bwd_epilogue.cuh"
#include "bwd_load.cuh"
#include "bwd_mainloop.cuh"
#include "bwd_traits.cuh"
#include "warpgroup.cuh"

namespace flash_cute::sm90 {

// The producer's thread draws tasks from a counter in memory, which every role then reads: so CTAs begin them in their
// order, whenever they come to run.
template <class Traits>
CUTE_DEVICE void bwd_producer(BwdArgs const& args, typename Traits::SharedStorage& smem) {
  int count = 0;  // of row tiles, of all key tiles
#pragma unroll 1
  for (int draws = 0;; ++draws) {
    int const index = atomicAdd(args.params.counters, 1);
    Task volatile& task = smem.task[draws & 1];
    smem.task_pipeline.wait_empty(at_step(draws));
    if (unsigned(index) < unsigned(args.num_tasks)) {
      Task::make<Traits>(args, index, task);
      Task const volatile& before = smem.task[(draws + 1) & 1];
      task.keys_phase = draws > 0 && before.keys_phase != (before.m_begin < args.m_blocks);
    } else {
      task.dq_begin = -1;
    }
    smem.task_pipeline.publish(at_step(draws));
    if (task.dq_begin < 0) break;
    load_key_tile<Traits>(args, smem, task, count);
  }
}

CUTE_DEVICE Task uniform(Task const volatile& task) {
  Task result;
  result.n_block = uniform(task.n_block);
  result.head_kv = uniform(task.head_kv);
  result.batch = uniform(task.batch);
  result.m_begin = uniform(task.m_begin);
  result.keys_phase = uniform(task.keys_phase);
  result.dq_begin = uniform(task.dq_begin);
  result.dq_end = uniform(task.dq_end);
  return result;
}

template <class Traits>
CUTE_DEVICE void bwd_consumer(BwdArgs const& args, typename Traits::SharedStorage& smem) {
  typename Traits::MmaKeys mma;
  using Tile = Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>;
  auto tdKrdK = partition_fragment_C(mma, Tile{});  // (MMA, MMA_N, MMA_D)
  auto tdVrdV = partition_fragment_C(mma, Tile{});  // (MMA, MMA_N, MMA_D)
  int count = 0;  // of steps, of all key tiles
#pragma unroll 1
  for (int draws = 0;; ++draws) {
    smem.task_pipeline.wait_full(at_step(draws));
    Task const task = uniform(smem.task[draws & 1]);
    if (task.dq_begin < 0) break;
    if (task.n_block >= 0) {
      clear(tdKrdK);
      clear(tdVrdV);
      if (task.m_begin < args.m_blocks) {
        bwd_mainloop<Traits>(args, task, count, smem, tdKrdK, tdVrdV);
        count += args.group * (args.m_blocks - task.m_begin);
      } else {
        wait_results_read();
      }
    }
    smem.sums_pipeline.wait_full(at_step(draws));
    DqRows<Traits> dq_rows;
    dq_rows.load(args, task.dq_begin, task.dq_end);
    if (task.n_block >= 0) bwd_epilogue<Traits>(args, task, count, smem, tdKrdK, tdVrdV);
    for (int row_tile = task.dq_begin; row_tile < task.dq_end;) {
      dq_rows.store(args, row_tile, task.dq_end);
      row_tile += dq_rows.kRowTiles;
      dq_rows.load(args, row_tile, task.dq_end);
    }
    __syncwarp();  // where there was no key tile: all lanes have passed their waits
    smem.task_pipeline.release(at_step(draws));
  }
  if (threadIdx.x % 128 == 0) tma_store_wait<0>();  // shared memory must stay until then
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) bwd_kernel(__grid_constant__ BwdArgs const args) {
  extern __shared__ char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);
  int const warpgroup = uniform(threadIdx.x / 128);

  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(&args.q);
    prefetch_tma_descriptor(&args.dout);
    prefetch_tma_descriptor(&args.k);
    prefetch_tma_descriptor(&args.v);
    smem.k_pipeline.init(4 * Traits::kWarpgroups);
    smem.v_pipeline.init(4 * Traits::kWarpgroups);
    smem.q_pipeline.init(4 * Traits::kWarpgroups);
    smem.dout_pipeline.init(4 * Traits::kWarpgroups);
    smem.task_pipeline.init(4 * Traits::kWarpgroups + 3);
    smem.ds_pipeline.init(Traits::kTurns ? 4 : 4 * Traits::kWarpgroups, 4 * Traits::kWarpgroups);
    for (auto& pipeline : smem.dq_pipeline) pipeline.init(1, 4);
    smem.sums_pipeline.init(1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // TMA sees the barriers
  }
  __syncthreads();

  if (warpgroup == 0) {
    set_max_registers<Traits::kProducerRegs, false>();
    int const warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
      if (warp == 0) {
        bwd_producer<Traits>(args, smem);
      } else if (warp == 1) {
        add_dq<Traits, 0>(args, smem);
      } else if (warp == 2) {
        add_dq<Traits, 1>(args, smem);
      } else {
        watch_sums<Traits>(args, smem);
      }
    }
  } else {
    set_max_registers<Traits::kConsumerRegs, true>();
    bwd_consumer<Traits>(args, smem);
  }
}

}  // namespace flash_cute::sm90
