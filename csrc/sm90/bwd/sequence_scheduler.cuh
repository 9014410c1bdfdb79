// The scheduler of batches whose sequences are read at run time: a thread of its own draws the tasks, a task ahead, so
// that nothing waits for what it looks up in global memory.
#pragma once

#include "dq_queue.cuh"
#include "task.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::bwd {

// The row tile of a number, with what its conversion needs.
CUTE_DEVICE DqTile make_dq_tile(BwdParams const& params, int block_m, int number) {
  ListedRowTile const tile = listed_row_tile(params, number);
  Extent const rows = row_extent(params, tile.index);
  return {.number = number,
          .head = tile.head,
          .batch = tile.index,
          .first_row = rows.first,
          .row = tile.m_block * block_m,
          .used = rows.used,
          .rows = rows.length};
}

// A ticket is a key tile's rank in the order of processing. A task without a key tile only converts sums: where many
// are in the queue, and when there are no more tickets.
template <class Traits>
CUTE_DEVICE void schedule_tasks(KernelArgs const& args, typename Traits::SharedStorage& smem) {
  BwdParams const& params = args.params;
  bool tickets = true;
#pragma unroll 1
  for (int draws = 0;; ++draws) {
    SequenceTask& task = smem.task[draws & 1];
    SequenceTask const volatile& before = smem.task[(draws + 1) & 1];
    smem.task_pipeline.wait_empty(at_step(draws));  // all have finished the task of two draws before
    task.begin = task.end = draws > 0 ? before.end : 0;
    task.keys_phase = draws > 0 && before.keys_phase != (before.begin < before.end);
    task.n_block = -1;
#pragma unroll 1
    for (;;) {
      TakenRowTiles const taken(params, SequenceTask::kMostRowTiles);
      task.dq_begin = 0;
      task.dq_end = taken.count;
#pragma unroll 1
      for (int i = 0; i < taken.count; ++i) {
        task.dq[i] = make_dq_tile(params, Traits::kBlockM, taken.number(params, i));
      }
      if (tickets && taken.left < SequenceTask::kMostRowTiles) {
        int const rank = atomicAdd(params.counters + DqQueue::kTicket, 1);
        tickets = SequenceKeyTile::make<Traits>(args, rank, task);
      }
      if (tickets || taken.count > 0) break;
      if (TakenRowTiles::all(params)) {
        task.dq_begin = -1;
        break;
      }
      __nanosleep(100);  // until other CTAs have added
    }
    bool const last = task.dq_begin < 0;
    smem.task_pipeline.publish(at_step(draws));
    if (last) break;
  }
}

}  // namespace flash_cute::sm90::bwd
