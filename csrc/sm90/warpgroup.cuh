// Warpgroup-wide operations: WGMMA, and the reallocation of registers.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

namespace flash_cute::sm90 {

using namespace cute;

// Makes a value that is equal in all lanes known as warp-uniform to the compiler. A value read from shared memory is
// not: the compiler takes loops that depend on it for divergent, and moves every descriptor to uniform registers before
// its WGMMA, which is 3 to 9 % slower.
CUTE_DEVICE int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// kMore: raises the registers per thread to kRegisters, else lowers them. By all warps of a warpgroup.
template <int kRegisters, bool kMore>
CUTE_DEVICE void set_max_registers() {
  if constexpr (kMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
}

// Descriptors of operands in shared memory, recomputed at each use from one register: the compiler would keep each of
// them in its own registers for the whole loop, and spill where the accumulators leave none.
template <class SharedStorage>
class Operands {
 public:
  CUTE_DEVICE explicit Operands(SharedStorage const& smem)
      : smem_(reinterpret_cast<char const*>(&smem)), base_((cast_smem_ptr_to_uint(&smem) & 0x3ffff) >> 4) {}

  // The fragment's descriptors for a tensor that begins `bytes`, a multiple of 16, after the address `place`.
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

// Issues acc (+)= A B as one WGMMA group, over share kPart of kParts equal shares of the k steps. The caller waits.
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

// Issues acc = A B with A's first kRegSteps k steps in registers (RS) and the others in shared memory (SS).
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
