// Types of the sm80 backward kernels that read sequences at run time.
#pragma once

#include "sequence_task.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

// Of the kernel of modified scores, which serves plain ones as well.
template <class Element_, int kHeadDim_, TileConfig kTile_>
struct SequenceTraits : Traits<Element_, kHeadDim_, kTile_> {
  using Base = Traits<Element_, kHeadDim_, kTile_>;
  using Task = SequenceTask;
  static constexpr bool kModifiesScores = true;

  // One buffer of row statistics: they are read in the first half of a step and loaded in the second.
  struct SharedStorage : Base::template Storage<1, 1> {
    SequenceTask task;
  };
  static_assert(sizeof(SharedStorage) <= sequence_smem_bytes(kTile_, kHeadDim_));
};

// Of the kernel of plain scores.
template <class Element_, int kHeadDim_, TileConfig kTile_>
struct PlainSequenceTraits : SequenceTraits<Element_, kHeadDim_, kTile_> {
  static constexpr bool kModifiesScores = false;
};

// What the pieces of the dense kernel ask of a schedule. One kernel serves both modes, which differ in what two threads
// do at the beginning and in the middle of a step.
template <class Traits_>
struct SequenceSchedule {
  using Traits = Traits_;
  static constexpr bool kTwoQ = Traits::kQStages == 2;
  static constexpr bool kTwoDout = Traits::kDoutStages == 2;
  static_assert(kTwoQ || !kTwoDout);
  static_assert(!(Traits::kPInRegs && kTwoQ));

  // For the addresses of the products in the second half of a step. What depends on the special register alone ptxas
  // keeps from the first half: the kernels of plain scores with P in shared memory then spill 4 to 8 bytes.
  CUTE_DEVICE static int thread_index() {
    if constexpr (Traits::kPInRegs || Traits::kModifiesScores) {
      return fresh_thread_index();
    } else {
      extern __shared__ char smem_raw[];
      return reinterpret_cast<typename Traits::SharedStorage const*>(smem_raw)->task.thread_again();
    }
  }
};

// See end_basic_block of the dense kernel.
CUTE_DEVICE void end_basic_block(BwdParams const& params) {
  if (params.heads_per_kv == 0) __trap();  // never taken
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
