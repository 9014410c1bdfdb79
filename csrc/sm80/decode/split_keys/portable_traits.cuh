// Types of the portable kernels: the tiles' ring.
#pragma once

#include "traits.cuh"
#include "work.cuh"

namespace flash_cute::sm80::decode::split_keys {

template <class Element, int kHeadDim, int kHeadDimV>
struct PortableTraits : Traits<Element, kHeadDim, kHeadDimV> {
  using Base = Traits<Element, kHeadDim, kHeadDimV>;
  static constexpr int kStages = split_keys::kStages;
  static constexpr int kSmemBytes = smem_bytes(kHeadDim, kHeadDimV);

  struct SharedStorage {
    alignas(1024) Element tiles[kStages][Base::kStageElements];
    ConsumerStorage<kHeadDim, kHeadDimV> consumers;
    Unit unit;
  };
  static_assert(sizeof(SharedStorage) <= kSmemBytes && kSmemBytes <= kLeastSmemOfChips);
};

}  // namespace flash_cute::sm80::decode::split_keys
