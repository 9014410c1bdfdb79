// The Hopper backward, persistent: a CTA takes a key tile, loops over the row tiles of all query heads that read it,
// stores its dK and dV, converts a share of an earlier head's dQ, and takes the next task. Two consumer warpgroups have
// 64 keys each. In a third warpgroup one thread issues all loads, two add dQ to global memory, and one waits for other
// CTAs' sums and parts, or schedules where sequences are read at run time.
#pragma once

#include "task.cuh"
#include "epilogue.cuh"
#include "dq_rows.cuh"
#include "sm90/backward/common/load.cuh"
#include "mainloop.cuh"
#include "masked_dq.cuh"
#include "mla_epilogue.cuh"
#include "mla_mainloop.cuh"
#include "sequence_scheduler.cuh"
#include "split.cuh"
#include "traits.cuh"
#include "core/memory_order.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

// The producer thread draws tasks from a ticket counter in global memory, and passes them to all other roles through
// shared memory. Tickets make CTAs begin tasks in order, whenever the CTAs themselves start.
template <class Traits>
CUTE_DEVICE void producer(KernelArgs const& args, typename Traits::SharedStorage& smem) {
  int task_number = 0;
  // Waits for the end of the task before the last, and counts its share of dQ as converted.
  auto end_task = [&](int draw) {
    Task const volatile& task = smem.task[draw & 1];
    // All consumer warps, the two adding threads and the watcher have finished that task: its slot may be overwritten.
    smem.task_pipeline.wait_empty(at_step(draw));
    if (draw < 2 || task.dq_begin >= task.dq_end) return;
    increment_release(head_counter(args, task.dq_head));
  };
#pragma unroll 1
  for (;; ++task_number) {
    typename Traits::Task volatile& task = smem.task[task_number & 1];
    Task const volatile& before = smem.task[(task_number + 1) & 1];
    bool const more = task_number > 0 && before.more;
    int const index = more ? 0 : atomicAdd(args.params.counters, 1);
    end_task(task_number);
    task.begin = task_number > 0 ? before.end : 0;
    task.keys_phase = task_number > 0 && before.keys_phase != (before.begin < before.end);
    if (more) {
      Task::make_second<Traits>(args, before, task);
    } else if (unsigned(index) < unsigned(args.params.task_order.num_tasks)) {
      Traits::Task::template make<Traits>(args, index, task);
    } else {
      task.dq_begin = -1;
    }
    smem.task_pipeline.publish(at_step(task_number));
    if (task.dq_begin < 0) break;
    load_key_tile<Traits>(args, smem, task);
  }
  end_task(task_number + 1);
}

// The same where sequences are read at run time, and another thread schedules.
template <class Traits>
CUTE_DEVICE void sequence_producer(KernelArgs const& args, typename Traits::SharedStorage& smem) {
#pragma unroll 1
  for (int task_number = 0;; ++task_number) {
    smem.task_pipeline.wait_full(at_step(task_number));  // the scheduler has written the task
    SequenceTask const volatile& task = smem.task[task_number & 1];
    if (task.dq_begin < 0) break;
    int const draw_at = max(int{task.begin}, task.end - kDrawAhead);
    auto const let_draw = [&](int step) {
      if (step == draw_at) smem.draw_pipeline.publish(at_step(task_number));
    };
    if (task.begin == task.end) let_draw(draw_at);
    load_key_tile<Traits>(args, smem, task, let_draw);
    smem.task_pipeline.arrive_empty(at_step(task_number));
  }
}

// Stores dK and dV if `stores`, and the task's share of dQ.
template <class Traits, class Share, class AccumulatorK, class AccumulatorV>
CUTE_DEVICE void store_results(KernelArgs const& args, KeyTile const& tile, int task_number,
                               typename Traits::SharedStorage& smem, Share const& share, bool stores,
                               AccumulatorK const& tdKrdK,    // (MMA, MMA_N, MMA_D)
                               AccumulatorV const& tdVrdV) {  // (MMA, MMA_N, MMA_DV)
  DqRows<Traits> dq_rows;
  dq_rows.load(share, share.begin);
  if constexpr (Traits::kByColumns) {
    if (stores) mla_epilogue<Traits>(args, tile, task_number, smem, tdKrdK, tdVrdV);
  } else {
    if (stores) epilogue<Traits>(args, tile, task_number, smem, tdKrdK, tdVrdV);
  }
  for (int row_tile = share.begin; row_tile < share.end;) {
    dq_rows.store(args.params, share, row_tile);
    row_tile += dq_rows.kRowTiles;
    dq_rows.load(share, row_tile);
  }
}

// What follows the main loop: parts, dK and dV, and the task's share of dQ.
template <class Traits, class AccumulatorK, class AccumulatorV>
CUTE_DEVICE void finish_task(KernelArgs const& args, KeyTile const& tile, int task_number,
                             typename Traits::SharedStorage& smem, Task const volatile& task,
                             AccumulatorK& tdKrdK,    // (MMA, MMA_N, MMA_D)
                             AccumulatorV& tdVrdV) {  // (MMA, MMA_N, MMA_DV)
  // The watcher: other CTAs' sums and parts for this task are complete.
  smem.sums_pipeline.wait_full(at_step(task_number));
  int const parts = uniform(task.parts);
  if (parts < 0) store_part<Traits>(args, uniform(task.range), uniform(task.split), tdKrdK, tdVrdV);
  if (parts > 0) merge_parts<Traits>(args, uniform(task.range), parts, tdKrdK, tdVrdV);
  using Share = std::conditional_t<Traits::kVariant.reads_mask, MaskedDqShare<Traits>, DenseDqShare<Traits>>;
  Share const share{args.params, uniform(task.dq_begin), uniform(task.dq_end)};
  bool const stores = tile.n_block >= 0 && parts >= 0;
  store_results<Traits>(args, tile, task_number, smem, share, stores, tdKrdK, tdVrdV);
}

// The same where sequences are read at run time.
template <class Traits, class AccumulatorK, class AccumulatorV>
CUTE_DEVICE void finish_task(KernelArgs const& args, KeyTile const& tile, int task_number,
                             typename Traits::SharedStorage& smem, SequenceTask const volatile& task,
                             AccumulatorK const& tdKrdK,    // (MMA, MMA_N, MMA_D)
                             AccumulatorV const& tdVrdV) {  // (MMA, MMA_N, MMA_DV)
  SequenceDqShare<Traits> const share{args.params, task.chunk, uniform(task.dq_begin), uniform(task.dq_end)};
  store_results<Traits>(args, tile, task_number, smem, share, tile.n_block >= 0, tdKrdK, tdVrdV);
}

template <class Traits, class AccumulatorK, class AccumulatorV>
CUTE_DEVICE void run_mainloop(KernelArgs const& args, KeyTile const& tile, int task_number,
                              typename Traits::SharedStorage& smem,
                              AccumulatorK& tdKrdK,    // (MMA, MMA_N, MMA_D)
                              AccumulatorV& tdVrdV) {  // (MMA, MMA_N, MMA_DV)
  if constexpr (!Traits::kByColumns) {
    mainloop<Traits>(args, tile, task_number, smem, tdKrdK, tdVrdV);
  } else if (uniform(consumer_thread() / 128) == 0) {
    mla_mainloop<Traits, 0>(args, tile, task_number, smem, tdKrdK, tdVrdV);
  } else {
    mla_mainloop<Traits, 1>(args, tile, task_number, smem, tdKrdK, tdVrdV);
  }
}

template <class Traits, int kParity>
CUTE_DEVICE void run_add_dq(KernelArgs const& args, typename Traits::SharedStorage& smem) {
  if constexpr (Traits::kVariant.reads_mask) {
    add_masked_dq<Traits, kParity>(args, smem);
  } else {
    add_dq<Traits, kParity>(args, smem);
  }
}

template <class Traits>
CUTE_DEVICE void consumer(KernelArgs const& args, typename Traits::SharedStorage& smem) {
  using TileK = Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>;
  using TileV = Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDimV>>;
  auto tdKrdK = partition_fragment_C(typename Traits::MmaDk{}, TileK{});  // (MMA, MMA_N, MMA_D)
  auto tdVrdV = partition_fragment_C(typename Traits::MmaDv{}, TileV{});  // (MMA, MMA_N, MMA_DV)
#pragma unroll 1
  for (int task_number = 0;; ++task_number) {
    smem.task_pipeline.wait_full(at_step(task_number));  // the producer has written the task
    typename Traits::Task const volatile& task = smem.task[task_number & 1];
    if (uniform(task.dq_begin) < 0) break;
    KeyTile const tile = read_uniform(static_cast<KeyTile const volatile&>(task));
    if (tile.n_block >= 0) {
      clear(tdKrdK);
      clear(tdVrdV);
      if (tile.begin < tile.end) {
        run_mainloop<Traits>(args, tile, task_number, smem, tdKrdK, tdVrdV);
      } else {
        wait_results_read();
      }
    }
    // The address of the task, too, is computed again: kept across the main loop, it spilled.
    typename Traits::Task const volatile& task_again = smem.task[opaque(task_number) & 1];
    KeyTile const tile_again = read_uniform(static_cast<KeyTile const volatile&>(task_again));
    finish_task<Traits>(args, tile_again, task_number, smem, task_again, tdKrdK, tdVrdV);
    __syncwarp();  // all lanes have passed their waits, also where there was no key tile
    smem.task_pipeline.release(at_step(task_number));
  }
  if (threadIdx.x % 128 == 0) tma_store_wait<0>();  // shared memory must live until the last TMA stores have read it
}

// Warp 0 loads, by the type of the tasks. Those of a dense batch it schedules, too, and warp 3 watches the sums of dQ;
// those of sequences are scheduled by warp 3.
template <class Traits>
CUTE_DEVICE void run_first_warp(KernelArgs const& args, typename Traits::SharedStorage& smem, Task const&) {
  producer<Traits>(args, smem);
}
template <class Traits>
CUTE_DEVICE void run_first_warp(KernelArgs const& args, typename Traits::SharedStorage& smem, SequenceTask const&) {
  sequence_producer<Traits>(args, smem);
}
template <class Traits>
CUTE_DEVICE void run_last_warp(KernelArgs const& args, typename Traits::SharedStorage& smem, Task const&) {
  watch_sums<Traits>(args, smem);
}
template <class Traits>
CUTE_DEVICE void run_last_warp(KernelArgs const& args, typename Traits::SharedStorage& smem, SequenceTask const&) {
  schedule_tasks<Traits>(args, smem);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) bwd_kernel(__grid_constant__ KernelArgs const args) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_raw);
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
    // The consumer warps, the adding threads, and the watcher or, where another thread schedules, the producer.
    smem.task_pipeline.init(4 * Traits::kWarpgroups + 3);
    smem.ds_pipeline.init(Traits::kAlternates ? 4 : 4 * Traits::kWarpgroups, 4 * Traits::kWarpgroups);
    for (auto& pipeline : smem.dq_pipeline) pipeline.init(1, 4);
    smem.sums_pipeline.init(1);
    smem.draw_pipeline.init(1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes the barriers visible to TMA
  }
  __syncthreads();  // thread 0 has initialised the barriers

  if (warpgroup == 0) {
    lower_max_registers<Traits::kProducerRegs>();
    int const warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
      if (warp == 0) {
        run_first_warp<Traits>(args, smem, smem.task[0]);
      } else if (warp == 1) {
        run_add_dq<Traits, 0>(args, smem);
      } else if (warp == 2) {
        run_add_dq<Traits, 1>(args, smem);
      } else {
        run_last_warp<Traits>(args, smem, smem.task[0]);
      }
    }
  } else {
    raise_max_registers<Traits::kConsumerRegs>();
    consumer<Traits>(args, smem);
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_memory
