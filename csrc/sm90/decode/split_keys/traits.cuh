// Types of the Hopper kernels of attention over a KV cache.
#pragma once

#include "core/split_keys/traits.cuh"
#include "core/split_keys/work.cuh"
#include "sm90/common/pipeline.cuh"
#include "tile.h"
#include "warpgroup_products.cuh"

namespace flash_cute::sm90::decode::split_keys {

template <class Element, int kHeadDim, int kHeadDimV, class Cache = Element>
struct Traits : flash_cute::split_keys::Traits<Element, kHeadDim, kHeadDimV, Cache> {
  using Base = flash_cute::split_keys::Traits<Element, kHeadDim, kHeadDimV, Cache>;
  static constexpr int kBytes = sizeof(Cache);
  static constexpr int kCtasPerSm = ctas_per_sm(kHeadDim, kHeadDimV, kBytes);
  static constexpr int kStages = stages(kHeadDim, kHeadDimV, kBytes);
  static_assert(kStages >= 4 && kBytes * Base::kStageElements == stage_bytes(kHeadDim, kHeadDimV, kBytes));

  // Of 64 rows. Float8 numbers are converted in registers; and where Q is in shared memory, it is there in fragments.
  static constexpr bool kHasWarpgroupProducts = !Base::kFloat8 && !Base::kQInShared;
  using WarpgroupProducts = split_keys::WarpgroupProducts<Element, kHeadDim, kHeadDimV, Base::kTileKeys>;

  // Of head dim 256 the registers are missing; and two CTAs hide each other's latencies, with few stages each.
  static constexpr bool kScoresAhead = !Base::kQInShared && kCtasPerSm == 1;

  // Tiles of K, and of V, that are in flight at most: a multiprocessor's share of memory's rate needs half of these
  // bytes. More would only queue up, and instructions and the first tiles of other CTAs behind them. (Where the number
  // of stages is odd K and V share them, so that a warp cannot tell whether its own tile has arrived: no limit then.)
  static constexpr int kBytesInFlight = 64 * 1024;
  static constexpr int kLimit = ceil_div(kBytesInFlight, 2 * kCtasPerSm * kBytes * Base::kStageElements);
  static constexpr int kTilesInFlight = kStages % 2 == 0 && 2 * kLimit < kStages ? kLimit : 0;  // 0: no limit

  struct SharedStorage {
    alignas(1024) Cache tiles[kStages][Base::kStageElements];
    flash_cute::split_keys::ConsumerStorage<kHeadDim, kHeadDimV, kBytes> consumers;
    Pipeline<kStages> pipeline;
    // The producer finds the units of work.
    flash_cute::split_keys::Unit units[2];
    Pipeline<2> unit_pipeline;
  };
  static constexpr int kSmemBytes = smem_bytes(kHeadDim, kHeadDimV, kBytes);
  static_assert(sizeof(SharedStorage) <= kSmemBytes && kSmemBytes <= smem_of_cta(kCtasPerSm));
};

}  // namespace flash_cute::sm90::decode::split_keys
