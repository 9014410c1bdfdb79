// The queue of row tiles whose sums of dQ are complete, where sequences are read at run time: no CTA knows beforehand
// which task completes them. The adding thread that counts a row tile's last key tile appends the row tile, and a
// scheduler takes some for each of its tasks, and at the end those that are left. In global memory, see DqQueue.
#pragma once

#include "../../core/sequence_tiles.cuh"
#include "task.cuh"

namespace flash_cute::sm90::bwd {

// Counts this key tile's add to a row tile, by the thread that has issued the bulk copies. The last one appends the row
// tile. The semaphore also gives the next key tile its turn.
CUTE_DEVICE void count_add(BwdParams const& params, int number, int visits) {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // the copies have been written
  asm volatile("fence.proxy.async;" ::: "memory");
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(params.semaphores + number)
               : "memory");
  if (before + 1 != visits) return;
  int const place = atomicAdd(params.counters + DqQueue::kTail, 1);
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(params.dq_queue + place), "r"(number + 1) : "memory");
}

// Takes up to `most` row tiles from the queue: [first, first + count). `left`: those that stay in it.
struct TakenRowTiles {
  int first;
  int count;
  int left;

  CUTE_DEVICE TakenRowTiles(BwdParams const& params, int most) : first(0), count(0), left(0) {
    int* const head = params.counters + DqQueue::kHead;
    auto const read = [](int const* counter) {
      int value;
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
      return value;
    };
    int seen = read(head);
#pragma unroll 1
    for (;;) {
      int const there = read(params.counters + DqQueue::kTail) - seen;
      if (there <= 0) return;
      int const taken = atomicCAS(head, seen, seen + min(most, there));
      if (taken == seen) {
        first = seen;
        count = min(most, there);
        left = there - count;
        return;
      }
      seen = taken;
    }
  }

  // The number of the i-th one. It has a place in the queue before it is there.
  CUTE_DEVICE int number(BwdParams const& params, int i) const {
    int value;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(params.dq_queue + first + i) : "memory");
    } while (value == 0);
    asm volatile("fence.proxy.async;" ::: "memory");  // bulk copies have written the sums
    return value - 1;
  }

  // Whether all row tiles that are visited have been taken.
  CUTE_DEVICE static bool all(BwdParams const& params) {
    int volatile const* const counters = params.counters;
    return counters[DqQueue::kHead] >= counters[DqQueue::kExpected];
  }
};

}  // namespace flash_cute::sm90::bwd
