// What a warpgroup does as one: products on the tensor cores, and its share of the registers.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

namespace flash_cute::sm90 {

using namespace cute;

template <int kRegisters, bool kMore>
CUTE_DEVICE void set_max_registers() {
  if constexpr (kMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
}

// Issues acc (+)= A B as one batch, over the kPart-th of kParts equal shares of the k steps. The caller waits.
template <bool kZeroInit, int kPart = 0, int kParts = 1, class Mma, class FragA, class FragB, class Acc>
CUTE_DEVICE void issue_gemm(Mma& mma,
                            FragA& tCrA,        // (MMA, MMA_M, MMA_K): registers or descriptors
                            FragB const& tCrB,  // (MMA, MMA_N, MMA_K): descriptors
                            Acc& acc) {         // (MMA, MMA_M, MMA_N)
  CUTE_STATIC_ASSERT_V(size<2>(tCrA) == size<2>(tCrB));
  static_assert(decltype(size<2>(tCrA))::value % kParts == 0);
  constexpr int kSteps = decltype(size<2>(tCrA))::value / kParts;
  constexpr bool kAInRegs = !std::is_base_of_v<SM90::GMMA::DescriptorIterator, typename Mma::FrgTypeA>;
  if constexpr (kAInRegs) warpgroup_fence_operand(tCrA);
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  mma.accumulate_ = kZeroInit ? SM90::GMMA::ScaleOut::Zero : SM90::GMMA::ScaleOut::One;
  CUTE_UNROLL
  for (int k = kPart * kSteps; k < (kPart + 1) * kSteps; ++k) {
    cute::gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
    mma.accumulate_ = SM90::GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(acc);
  if constexpr (kAInRegs) warpgroup_fence_operand(tCrA);
}

}  // namespace flash_cute::sm90
