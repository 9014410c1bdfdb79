// The fix-up of split row tiles, see TileSplit: each CTA has some of the keys. A CTA that did not begin the tile stores
// its part in global memory; the one that began it merges the parts in the order of the ranges, so that the result is
// bitwise reproducible. A thread's values are read by the thread of the same index, which has the same rows and
// columns; there is one flag per warp.
#pragma once

#include <cute/tensor.hpp>

#include "core/layout.cuh"
#include "core/memory_order.cuh"
#include "core/registers.cuh"
#include "core/softmax.cuh"
#include "tile.h"
#include "sm90/common/pipeline.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::forward::rows {

using namespace cute;

// One thread's share of a part in global memory. Its address is recomputed for each tile, like the epilogue's.
template <class Traits>
struct PartSlot {
  float4* words;  // every 128th: the accumulator, two columns of both rows per word; the last two hold row statistics
  int* flag;      // of the warp: 1 when its share of the part is in memory

  CUTE_DEVICE PartSlot(FwdParams const& params, int warpgroup, int range) {
    int const thread = fresh_thread_index();
    int const slot = range * Traits::kWarpgroups + warpgroup;
    words = reinterpret_cast<float4*>(params.parts) + slot * (part_floats(Traits::kHeadDimV) * 32) + thread % 128;
    flag = params.part_flags + slot * 4 + thread % 128 / 32;
  }
};

// Stores this CTA's part and sets the warp's flag.
template <class Traits, class Accumulator>
CUTE_DEVICE void store_part(FwdParams const& params, int volatile const& range, int warpgroup,
                            OnlineSoftmax<2> const& softmax,
                            Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  PartSlot<Traits> const slot(params, warpgroup, range);
  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  constexpr int kPairs = decltype(size<1>(acc))::value / 2;
  CUTE_UNROLL
  for (int j = 0; j < kPairs; ++j) {
    __stcg(slot.words + j * 128, float4{acc(0, 2 * j), acc(0, 2 * j + 1), acc(1, 2 * j), acc(1, 2 * j + 1)});
  }
  __stcg(slot.words + kPairs * 128, float4{softmax.offset[0], softmax.offset[1], softmax.sum[0], softmax.sum[1]});
  __stcg(slot.words + (kPairs + 1) * 128, float4{softmax.error[0], softmax.error[1], 0.f, 0.f});
  jitter();
  __syncwarp();  // all lanes have stored: lane 0 releases for the warp
  if (threadIdx.x % 32 == 0) store_release(slot.flag, 1);
}

// Merges the parts of the ranges after this CTA's. Their CTAs drew lower tickets, so that they run already, and store
// their parts before they wait for any other CTA.
template <class Traits, class Accumulator>
CUTE_DEVICE void merge_parts(FwdParams const& params, int volatile const& range, int parts, int warpgroup,
                             OnlineSoftmax<2>& softmax,
                             Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  constexpr int kPairs = decltype(size<1>(acc))::value / 2;
  constexpr int kAtOnce = Traits::kHeadDimV > 256 ? 4 : Traits::kHeadDimV > 64 && Traits::kHeadDimV <= 192 ? 16 : 8;
  auto barrier = [] { return kMerge + fresh_thread_index() / 128 - 1; };
#pragma unroll 1
  for (int part = 1; part <= parts; ++part) {
    PartSlot<Traits> const slot(params, warpgroup, range + part);
    while (uniform(load_acquire(slot.flag)) == 0) continue;  // all lanes leave together, which the compiler must know
    named_sync(barrier(), 128);  // makes every lane's acquire visible to the warpgroup
    float4 const stats = __ldcg(slot.words + kPairs * 128), errors = __ldcg(slot.words + (kPairs + 1) * 128);
    float2 const factors_0 = softmax.merge(0, stats.x, stats.z, errors.x);
    float2 const factors_1 = softmax.merge(1, stats.y, stats.w, errors.y);
    CUTE_UNROLL
    for (int j = 0; j < kPairs; ++j) {
      if (j > 0 && j % kAtOnce == 0) named_sync(barrier(), 128);  // limits hoisted loads to what the registers hold
      float4 const other = __ldcg(slot.words + j * 128);
      acc(0, 2 * j) = acc(0, 2 * j) * factors_0.x + other.x * factors_0.y;
      acc(0, 2 * j + 1) = acc(0, 2 * j + 1) * factors_0.x + other.y * factors_0.y;
      acc(1, 2 * j) = acc(1, 2 * j) * factors_1.x + other.z * factors_1.y;
      acc(1, 2 * j + 1) = acc(1, 2 * j + 1) * factors_1.x + other.w * factors_1.y;
    }
  }
}

}  // namespace flash_cute::sm90::forward::rows
