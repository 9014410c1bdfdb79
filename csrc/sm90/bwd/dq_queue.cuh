// The queue of chunks of row tiles whose sums of dQ are complete, where sequences are read at run time: the order in
// which CTAs complete them is not known beforehand. The adding thread that counts the last key tile of a sequence and
// KV head appends the chunks of its row tiles, and a scheduler takes one for each of its tasks, and at the end those
// that are left. In global memory: BwdParams::dq_queue has the queue's places, then the counts, see also DqQueue.
#pragma once

#include "../../core/sequence_tiles.cuh"
#include "task.cuh"

namespace flash_cute::sm90::bwd {

// Counts the task's adds as done, by each of the two adding threads, which have waited for their bulk copies. The last
// one of the sequence and KV head appends the chunks. A place of the queue has the number of the row tile that is as
// far from the first one of the sequence and KV head as the chunk is from the first chunk, plus 1.
template <class Traits>
CUTE_DEVICE void count_key_tile(BwdParams const& params, SequenceTask const volatile& task) {
  int const row_tiles = ceil_div(int(task.sequence.rows), int{Traits::kBlockM});
  if (row_tiles == 0 || !task.fits) return;
  int const first = row_tile_index<Traits>(params, task, RowTile{.m_block = 0});
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(params.dq_queue + params.heads_q * params.m_blocks + first)
               : "memory");
  int const arrivals = 2 * ceil_div(int{task.keys}, int{Traits::kBlockN});
  if (before + 1 != arrivals) return;
  int const chunks = ceil_div(params.group * row_tiles, int{DqQueue::kChunk});
  int place = atomicAdd(params.counters + DqQueue::kTail, chunks);
  __threadfence();  // releases what all have added, with the stores that follow
#pragma unroll 1
  for (int i = 0; i < chunks; ++i, ++place) {
    int const number = first + i / row_tiles * params.m_blocks + i % row_tiles;
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(params.dq_queue + place), "r"(number + 1) : "memory");
  }
}

// The number of a chunk, taken from the queue.
struct TakenChunk {
  int number;  // -1: none
  int left;    // chunks that stay in the queue

  CUTE_DEVICE explicit TakenChunk(BwdParams const& params) : number(-1), left(0) {
    int const volatile* const counters = params.counters;
    int const tail = counters[DqQueue::kTail];
    int taken = counters[DqQueue::kHead];
#pragma unroll 1
    for (;;) {
      left = tail - taken - 1;
      if (left < 0) return;
      int const seen = atomicCAS(params.counters + DqQueue::kHead, taken, taken + 1);
      if (seen == taken) break;
      taken = seen;
    }
    do {  // the chunk has a place in the queue before it is there
      number = read(params.dq_queue + taken) - 1;
    } while (number < 0);
    asm volatile("fence.proxy.async;" ::: "memory");  // bulk copies have written the sums
  }

  // Whether all chunks have been taken.
  CUTE_DEVICE static bool all(BwdParams const& params) {
    return read(params.counters + DqQueue::kHead) >= params.counters[DqQueue::kExpected];
  }

 private:
  CUTE_DEVICE static int read(int const* counter) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
  }
};

}  // namespace flash_cute::sm90::bwd
