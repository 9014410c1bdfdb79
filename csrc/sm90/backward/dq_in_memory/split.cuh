// The fix-up of split key tiles, see TileSplit: each CTA loops over some of the rows. A CTA that did not begin the tile
// stores its part, dK and dV in float32, in global memory; the one that began it adds the parts, one after the other. A
// thread's values are read by the thread of the same index, which has the same keys and columns.
//
// Parts need no memory of their own. The ranges of split tiles come last, when dQ of the first heads has long been
// converted: a part overwrites the sums of those heads, and the semaphores of their row tiles, left at 1 by key tile 0,
// count the arrivals of a tile's parts. So the watcher waits for the conversion, and for that 1, before a part is
// stored, and for all parts before they are read.
#pragma once

#include <cute/tensor.hpp>

#include "task.cuh"
#include "dq.cuh"
#include "sm90/backward/common/scores.cuh"
#include "core/memory_order.cuh"
#include "sm90/common/pipeline.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

// A thread's share of a part in global memory: every kConsumerThreads-th float4; dK's registers, then dV's.
template <class Traits>
CUTE_DEVICE float4* part_address(KernelArgs const& args, int range) {
  int64_t const floats = int64_t{Traits::kPartRowTiles} * Traits::kQElements;
  return reinterpret_cast<float4*>(args.params.dq_acc + range * floats) + consumer_thread();
}

// Stores this CTA's part and counts one arrival per consumer warp.
template <class Traits, class AccumulatorK, class AccumulatorV>
CUTE_DEVICE void store_part(KernelArgs const& args, int range, int split,
                            AccumulatorK const& tdKrdK,    // (MMA, MMA_N, MMA_D)
                            AccumulatorV const& tdVrdV) {  // (MMA, MMA_N, MMA_DV)
  constexpr int kFoursK = decltype(size(tdKrdK))::value / 4, kFoursV = decltype(size(tdVrdV))::value / 4;
  static_assert((kFoursK + kFoursV) * 4 * Traits::kConsumerThreads <= Traits::kPartRowTiles * Traits::kQElements);
  float4* const part = part_address<Traits>(args, range);
  auto put = [&](float4* to, auto const& acc) {
    CUTE_UNROLL
    for (int i = 0; i < size(acc) / 4; ++i) {
      __stcg(to + i * Traits::kConsumerThreads, float4{acc(4 * i), acc(4 * i + 1), acc(4 * i + 2), acc(4 * i + 3)});
    }
  };
  put(part, tdKrdK);
  put(part + kFoursK * Traits::kConsumerThreads, tdVrdV);
  jitter();
  __syncwarp();  // all lanes have stored: lane 0 releases for the warp
  if (consumer_thread() % 32 == 0) {
    increment_release(part_counter(args, split));
  }
}

// Adds the parts in the order of the ranges, so that dK and dV are bitwise reproducible.
template <class Traits, class AccumulatorK, class AccumulatorV>
CUTE_DEVICE void merge_parts(KernelArgs const& args, int range, int parts,
                             AccumulatorK& tdKrdK,    // (MMA, MMA_N, MMA_D)
                             AccumulatorV& tdVrdV) {  // (MMA, MMA_N, MMA_DV)
  constexpr int kFoursK = decltype(size(tdKrdK))::value / 4;
  auto add = [&](float4 const* from, auto& acc) {
    CUTE_UNROLL
    for (int i = 0; i < size(acc) / 4; ++i) {
      float4 const other = __ldcg(from + i * Traits::kConsumerThreads);
      acc(4 * i) += other.x;
      acc(4 * i + 1) += other.y;
      acc(4 * i + 2) += other.z;
      acc(4 * i + 3) += other.w;
      // Loads do not pass it: all in flight together would take more registers than there are.
      if (Traits::kByColumns && i % 8 == 7) __syncwarp();
    }
  };
#pragma unroll 1
  for (int part = 1; part <= parts; ++part) {
    float4 const* const values = part_address<Traits>(args, range + part);
    add(values, tdKrdK);
    add(values + kFoursK * Traits::kConsumerThreads, tdVrdV);
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_memory
