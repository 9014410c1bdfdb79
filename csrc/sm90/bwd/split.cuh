// Key tiles that several CTAs share, see TileSplit: each passes over some of the rows. What a CTA has of a tile that
// another began, dK and dV in float32, it leaves in memory, and the one that began it takes that in, part by part. A
// thread hands over to the thread of its number, which has the same keys and columns.
//
// No memory is set aside for it. The ranges of split tiles come last, when dQ of the first heads has long been turned
// into rows: a part takes the place of their sums, and the semaphores there, left at 1 by key tile 0, count who is done
// with a part of a tile. So the watcher waits for those rows, and for the 1, before a part is stored, and for the parts
// before they are read.
#pragma once

#include <cute/tensor.hpp>

#include "task.cuh"
#include "dq.cuh"
#include "scores.cuh"
#include "../pipeline.cuh"

namespace flash_cute::sm90::bwd {

// A thread's share of a part in memory: every kConsumerThreads-th float4, first dK's registers, then dV's.
template <class Traits>
CUTE_DEVICE float4* part_place(KernelArgs const& args, int range) {
  int64_t const floats = int64_t{Traits::kPartRowTiles} * Traits::kQElements;
  return reinterpret_cast<float4*>(args.params.dq_acc + range * floats) + consumer_thread();
}

template <class Traits, class Accumulator>
CUTE_DEVICE void store_part(KernelArgs const& args, int range, int split,
                            Accumulator const& tdKrdK,    // (MMA, MMA_N, MMA_D)
                            Accumulator const& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  constexpr int kFours = decltype(size(tdKrdK))::value / 4;
  static_assert(2 * kFours * 4 * Traits::kConsumerThreads == Traits::kPartRowTiles * Traits::kQElements);
  float4* const place = part_place<Traits>(args, range);
  auto put = [&](float4* to, Accumulator const& acc) {
    CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) {
      __stcg(to + i * Traits::kConsumerThreads, float4{acc(4 * i), acc(4 * i + 1), acc(4 * i + 2), acc(4 * i + 3)});
    }
  };
  put(place, tdKrdK);
  put(place + kFours * Traits::kConsumerThreads, tdVrdV);
  jitter();
  __syncwarp();
  if (consumer_thread() % 32 == 0) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(part_counter(args, split)) : "memory");
  }
}

// In the order of the ranges: the sums have the same bits each time.
template <class Traits, class Accumulator>
CUTE_DEVICE void merge_parts(KernelArgs const& args, int range, int parts,
                             Accumulator& tdKrdK,    // (MMA, MMA_N, MMA_D)
                             Accumulator& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  constexpr int kFours = decltype(size(tdKrdK))::value / 4;
  auto add = [&](float4 const* from, Accumulator& acc) {
    CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) {
      float4 const other = __ldcg(from + i * Traits::kConsumerThreads);
      acc(4 * i) += other.x;
      acc(4 * i + 1) += other.y;
      acc(4 * i + 2) += other.z;
      acc(4 * i + 3) += other.w;
    }
  };
#pragma unroll 1
  for (int part = 1; part <= parts; ++part) {
    float4 const* const place = part_place<Traits>(args, range + part);
    add(place, tdKrdK);
    add(place + kFours * Traits::kConsumerThreads, tdVrdV);
  }
}

}  // namespace flash_cute::sm90::bwd
