// Types of the portable kernels of attention over a KV cache: the tiles' ring.
#pragma once

#include "core/split_keys/traits.cuh"
#include "core/split_keys/work.cuh"
#include "tile.h"

namespace flash_cute::sm80::decode::split_keys {

template <class Element, int kHeadDim, int kHeadDimV>
struct Traits : flash_cute::split_keys::Traits<Element, kHeadDim, kHeadDimV> {
  using Base = flash_cute::split_keys::Traits<Element, kHeadDim, kHeadDimV>;
  static constexpr int kStages = split_keys::kStages;
  static constexpr int kSmemBytes = smem_bytes(kHeadDim, kHeadDimV);

  struct SharedStorage {
    alignas(1024) Element tiles[kStages][Base::kStageElements];
    flash_cute::split_keys::ConsumerStorage<kHeadDim, kHeadDimV, sizeof(Element)> consumers;
    flash_cute::split_keys::Unit unit;
  };
  static_assert(sizeof(SharedStorage) <= kSmemBytes && kSmemBytes <= kLeastSmemOfChips);
};

}  // namespace flash_cute::sm80::decode::split_keys
