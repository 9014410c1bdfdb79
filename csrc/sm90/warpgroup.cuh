// What a warpgroup does as one: products on the tensor cores, and its share of the registers.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

namespace flash_cute::sm90 {

using namespace cute;

// A value that all lanes have, and now are known to have. What a warp reads from shared memory is not: the compiler
// would take the loops that depend on it for divergent, and move every descriptor to the uniform registers before its
// WGMMA: 3 to 9 % slower.
CUTE_DEVICE int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

template <int kRegisters, bool kMore>
CUTE_DEVICE void set_max_registers() {
  if constexpr (kMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
}

// Descriptors of operands in shared memory, made anew at each use from one register: the compiler would keep every one
// in registers of its own for the whole loop, and where the accumulators leave none, spill.
template <class SharedStorage>
class Operands {
 public:
  CUTE_DEVICE explicit Operands(SharedStorage const& smem)
      : smem_(reinterpret_cast<char const*>(&smem)), base_((cast_smem_ptr_to_uint(&smem) & 0x3ffff) >> 4) {}

  // The fragment's descriptors, as if its tensor began `bytes`, a multiple of 16, after `place`.
  template <class Fragment>
  CUTE_DEVICE auto at(Fragment const& fragment, void const* place, uint32_t bytes = 0) const {
    uint32_t base;
    asm volatile("mov.b32 %0, %1;" : "=r"(base) : "r"(base_));
    uint32_t const offset = (uint32_t(static_cast<char const*>(place) - smem_) >> 4) + (bytes >> 4);
    auto descriptors = fragment.data();
    descriptors.desc_.reg32_[0] = (descriptors.desc_.reg32_[0] & 0xffff0000u) + base + offset;
    return make_tensor(descriptors, fragment.layout());
  }

 private:
  char const* smem_;
  uint32_t base_;
};

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

// The same from zero, with the first kRegSteps k steps of A in registers and the others in shared memory.
template <int kRegSteps, class MmaRs, class Mma, class FragARegs, class FragA, class FragB, class Acc>
CUTE_DEVICE void issue_gemm_rs_ss(MmaRs& mma_rs, FragARegs& tCrA_regs,  // (MMA, MMA_M, MMA_K): registers
                                  Mma& mma, FragA const& tCrA,          // (MMA, MMA_M, MMA_K): descriptors
                                  FragB const& tCrB,                    // (MMA, MMA_N, MMA_K): descriptors
                                  Acc& acc) {                           // (MMA, MMA_M, MMA_N)
  static_assert(0 < kRegSteps && kRegSteps <= decltype(size<2>(tCrA))::value);
  auto fence_regs = [&] {
    for_each(make_int_sequence<kRegSteps>{}, [&](auto k) {
      auto tCrA_k = tCrA_regs(_, _, k);
      warpgroup_fence_operand(tCrA_k);
    });
  };
  fence_regs();
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  mma_rs.accumulate_ = SM90::GMMA::ScaleOut::Zero;
  mma.accumulate_ = SM90::GMMA::ScaleOut::One;
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrA); ++k) {
    if (k < kRegSteps) {
      cute::gemm(mma_rs, tCrA_regs(_, _, k), tCrB(_, _, k), acc);
      mma_rs.accumulate_ = SM90::GMMA::ScaleOut::One;
    } else {
      cute::gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
    }
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(acc);
  fence_regs();
}

}  // namespace flash_cute::sm90
