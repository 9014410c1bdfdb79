// The scheduler of batches whose sequences are read at run time: a thread of its own draws the tasks, a few steps
// before the loads of the last one end, so that little waits for what it looks up in global memory. Not earlier: other
// CTAs may wait for the adds of a task that has been drawn, which its CTA would not begin yet.
#pragma once

#include "core/registers.cuh"
#include "dq_queue.cuh"
#include "task.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

constexpr int kDrawAhead = 4;  // steps between a draw and the last loads of the task before it

// Takes a chunk, with what its conversion needs, as the task's share of dQ. Returns how many row tiles are left, about.
template <class Traits>
CUTE_DEVICE int take_chunk(BwdParams const& params, SequenceTask& task) {
  TakenChunk const taken(params, task.slot);
  task.dq_begin = task.dq_end = 0;
  if (taken.number < 0) return 0;
  ListedRowTile const tile = listed_row_tile(params, taken.number);
  SequenceRecord const& record = params.tiles.records[tile.index];
  copy_to_smem(record.sequence, task.chunk.sequence);
  // Step by step through shared memory: the thread has few registers.
  DqChunk volatile& chunk = task.chunk;
  chunk.batch = tile.index;
  chunk.first_row_tile = record.first_row_tile;
  chunk.head_kv = tile.head / params.heads_per_kv;
  int const row_tiles = ceil_div(int(chunk.sequence.rows), int{Traits::kBlockM});
  chunk.row_tiles = row_tiles;
  SequenceTask volatile& there = task;
  there.dq_begin = tile.head % params.heads_per_kv * row_tiles + tile.m_block;  // the chunk's number
  int const share = DqQueue::chunk(params, row_tiles, ceil_div(int{record.keys}, int{Traits::kBlockN}));
  there.dq_end = min((there.dq_begin + 1) * share, params.heads_per_kv * row_tiles);
  there.dq_begin = there.dq_begin * share;
  return taken.left * share;
}

// A ticket is a key tile's rank in the order of processing. A task without a key tile only converts sums: where many
// row tiles are in the queue, and when there are no more tickets.
template <class Traits>
CUTE_DEVICE void schedule_tasks(KernelArgs const& args, typename Traits::SharedStorage& smem) {
  constexpr int kMany = 512;  // row tiles in the queue, of all CTAs
  BwdParams const& params = args.params;
  bool tickets = true;
#pragma unroll 1
  for (int task_number = 0;; ++task_number) {
    SequenceTask& task = smem.task[task_number & 1];
    SequenceTask const volatile& before = smem.task[(task_number + 1) & 1];
    smem.task_pipeline.wait_empty(at_step(task_number));  // all have finished the task before the last
    // The producer is about to finish the last task.
    if (task_number > 0) smem.draw_pipeline.wait_full(at_step(task_number - 1));
    task.begin = task.end = task_number > 0 ? before.end : 0;
    task.keys_phase = task_number > 0 && before.keys_phase != (before.begin < before.end);
    task.n_block = -1;
    task.slot = task_number > 0 ? before.slot : -1;
#pragma unroll 1
    for (;;) {
      int const left = take_chunk<Traits>(params, task);
      if (tickets && left < kMany) {
        int const rank = atomicAdd(params.counters + DqQueue::kTicket, 1);
        tickets = SequenceKeyTile::make<Traits>(args, rank, task);
      }
      if (tickets || task.dq_end > task.dq_begin) break;
      if (TakenChunk::all(params, task.slot)) {
        task.dq_begin = -1;
        break;
      }
      __nanosleep(100);  // until other CTAs have added
    }
    bool const last = task.dq_begin < 0;
    smem.task_pipeline.publish(at_step(opaque(task_number)));  // the stage's number is not kept: there is no register
    if (last) break;
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_memory
