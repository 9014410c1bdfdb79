// Types of the sm80 backward kernels that read a mask.
#pragma once

#include "masked_task.cuh"
#include "sequence_traits.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

// Of the kernel of modified scores, which serves plain ones as well.
template <class Element_, int kHeadDim_, TileConfig kTile_>
struct MaskedTraits : Traits<Element_, kHeadDim_, kTile_> {
  using Base = Traits<Element_, kHeadDim_, kTile_>;
  using Task = MaskedTask;
  static constexpr bool kModifiesScores = true;

  // One buffer of row statistics, as where sequences are read at run time.
  struct SharedStorage : Base::template Storage<1, 1> {
    MaskedTask task;
  };
  static_assert(sizeof(SharedStorage) <= sequence_smem_bytes(kTile_, kHeadDim_));
};

// Of the kernel of plain scores.
template <class Element_, int kHeadDim_, TileConfig kTile_>
struct PlainMaskedTraits : MaskedTraits<Element_, kHeadDim_, kTile_> {
  static constexpr bool kModifiesScores = false;
};

}  // namespace flash_cute::sm80::backward::dq_in_memory
