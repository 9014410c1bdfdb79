// Types of the sm80 backward kernel that reads sequences at run time.
#pragma once

#include "sequence_task.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::bwd {

template <class Element_, int kHeadDim_, TileConfig kTile_>
struct SequenceTraits : Traits<Element_, kHeadDim_, kTile_> {
  using Base = Traits<Element_, kHeadDim_, kTile_>;

  struct SharedStorage : Base::SharedStorage {
    SequenceTask task;
  };
  static_assert(sizeof(SharedStorage) <= smem_bytes(kTile_, kHeadDim_) + kSequenceBytes);
};

// What the pieces of the dense kernel ask of a schedule. One kernel serves both modes, which differ in what two threads
// do at the beginning and in the middle of a step.
template <class Traits_>
struct SequenceSchedule {
  using Traits = Traits_;
  static constexpr bool kTwoQ = Traits::kQStages == 2;
  static_assert(Traits::kDoutStages == 1 && !(Traits::kPInRegs && kTwoQ));
};

// See end_basic_block of the dense kernel.
CUTE_DEVICE void end_basic_block(BwdParams const& params) {
  if (params.group == 0) __trap();  // never taken
}

}  // namespace flash_cute::sm80::bwd
