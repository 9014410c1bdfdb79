// The queue of chunks of row tiles whose sums of dQ are complete, where sequences are read at run time: the order in
// which CTAs complete them is not known beforehand. The adding thread that counts the last key tile of a sequence and
// KV head appends the chunks of its row tiles, and a scheduler takes one for each of its tasks, and at the end those
// that are left. In global memory: BwdParams::dq_queue has the queue's slots, then the counts, see also DqQueue.
#pragma once

#include "core/memory_order.cuh"
#include "core/sequence_tiles.cuh"
#include "task.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

// Counts the task's adds as done, by each of the two adding threads, which have waited for their bulk copies. The last
// one of the sequence and KV head appends the chunks. A slot of the queue has the number of the row tile that is as
// far from the first one of the sequence and KV head as the chunk is from the first chunk, plus 1.
template <class Traits>
CUTE_DEVICE void count_key_tile(BwdParams const& params, SequenceTask const volatile& task) {
  int const row_tiles = ceil_div(int(task.sequence.rows), int{Traits::kBlockM});
  if (row_tiles == 0) return;
  int const first = row_tile_index<Traits>(params, task, RowTile{.m_block = 0});
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(params.dq_queue + params.heads_q * params.m_blocks + first)
               : "memory");
  int const key_tiles = ceil_div(int{task.keys}, int{Traits::kBlockN}), arrivals = 2 * key_tiles;
  if (before + 1 != arrivals) return;
  int const chunks = DqQueue::chunks(params, row_tiles, key_tiles);
  int slot = atomicAdd(params.counters + DqQueue::kTail, chunks);
  __threadfence();  // releases what all have added, with the stores that follow
#pragma unroll 1
  for (int i = 0; i < chunks; ++i, ++slot) {
    int const number = first + i / row_tiles * params.m_blocks + i % row_tiles;
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(params.dq_queue + slot), "r"(number + 1) : "memory");
  }
}

// A chunk that a CTA takes. It takes a slot by one atomic addition: with compare and swap, of all CTAs that try at a
// time one succeeds and the others try again, and small chunks came to each of them 30,000 clocks late.
struct TakenChunk {
  int number;  // -1: there is none
  int left;    // chunks that stay in the queue behind it

  // `slot`: one that the CTA has taken, but without a chunk so far; -1: none.
  CUTE_DEVICE TakenChunk(BwdParams const& params, int volatile& slot) : number(-1), left(0) {
    int const volatile* const counters = params.counters;
    int const tail = counters[DqQueue::kTail];
    if (slot < 0) {
      if (counters[DqQueue::kHead] >= tail) return;
      slot = atomicAdd(params.counters + DqQueue::kHead, 1);
    }
    if (slot >= tail) return;  // others were faster: the next chunk that comes to the slot is this CTA's
    left = tail - slot - 1;
    do {  // the chunk has a slot in the queue before it is there
      number = load_acquire(params.dq_queue + slot) - 1;
    } while (number < 0);
    asm volatile("fence.proxy.async;" ::: "memory");  // bulk copies have written the sums
    slot = -1;
  }

  // Whether no chunk is left for a CTA.
  CUTE_DEVICE static bool all(BwdParams const& params, int slot) {
    return (slot < 0 ? load_acquire(params.counters + DqQueue::kHead) : slot) >= params.counters[DqQueue::kExpected];
  }
};

}  // namespace flash_cute::sm90::backward::dq_in_memory
