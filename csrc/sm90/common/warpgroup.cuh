// Warpgroup-wide operations: WGMMA, and the reallocation of registers.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "core/registers.cuh"

namespace flash_cute::sm90 {

using namespace cute;

// Makes a value that is equal in all lanes known as warp-uniform to the compiler. A value read from shared memory is
// not: the compiler takes loops that depend on it for divergent, and moves every descriptor to uniform registers before
// its WGMMA, which is 3 to 9 % slower.
CUTE_DEVICE int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// A thread's first row of a WGMMA's accumulator of 64 rows; it has another one 8 rows below.
template <class Index>
CUTE_HOST_DEVICE constexpr Index first_row_of_thread(Index thread) {
  return thread % 128 / 32 * 16 + thread % 32 / 4;
}
static_assert([] {
  SM90::GMMA::CLayout_64x8 const layout;  // (thread, value) -> row + 64 * column
  for (int thread = 0; thread < 128; ++thread) {
    if (first_row_of_thread(thread) != layout(thread, _0{}) % 64) return false;
  }
  return true;
}());

// Raise or lower the registers per thread to kRegisters. By all warps of a warpgroup.
template <int kRegisters>
CUTE_DEVICE void raise_max_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
CUTE_DEVICE void lower_max_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Whether `value` is true in any thread of the warpgroup. All its warps wait for each other, at named barrier
// `barrier`, which only they use.
CUTE_DEVICE bool any_in_warpgroup(bool value, int barrier) {
  int any;
  asm volatile(
      "{ .reg .pred value, any;\n"
      "setp.ne.b32 value, %1, 0;\n"
      "bar.red.or.pred any, %2, 128, value;\n"
      "selp.b32 %0, 1, 0, any; }\n"
      : "=r"(any)
      : "r"(int(value)), "r"(barrier)
      : "memory");
  return uniform(any) != 0;
}

// Descriptors of operands in shared memory, recomputed at each use from one register: the compiler would keep each of
// them in its own registers for the whole loop, and spill where the accumulators leave none.
template <class SharedStorage>
class Operands {
 public:
  CUTE_DEVICE explicit Operands(SharedStorage const& smem)
      : smem_(reinterpret_cast<char const*>(&smem)), base_((cast_smem_ptr_to_uint(&smem) & 0x3ffff) >> 4) {}

  // The fragment's descriptors for a tensor that begins `bytes`, a multiple of 16, after `buffer` in shared memory.
  template <class Fragment>
  CUTE_DEVICE auto at(Fragment const& fragment, void const* buffer, uint32_t bytes = 0) const {
    uint32_t const base = opaque(base_);
    uint32_t const offset = (uint32_t(static_cast<char const*>(buffer) - smem_) >> 4) + (bytes >> 4);
    auto descriptors = fragment.data();
    descriptors.desc_.reg32_[0] = (descriptors.desc_.reg32_[0] & 0xffff0000u) + base + offset;
    return make_tensor(descriptors, fragment.layout());
  }

 private:
  char const* smem_;
  uint32_t base_;
};

// What a GEMM does with its accumulator: acc = A B or acc += A B.
enum class Accumulate { kOverwrite, kAdd };

// One of `of` equal shares of a GEMM's k steps, or of what they read.
struct Share {
  int index = 0;
  int of = 1;
};

// Issues a GEMM over a share of the k steps as one WGMMA group. The caller waits.
template <Accumulate kAccumulate, Share kShare = Share{}, class Mma, class FragA, class FragB, class Acc>
CUTE_DEVICE void issue_gemm(Mma& mma,
                            FragA& tCrA,        // (MMA, MMA_M, MMA_K): registers or descriptors
                            FragB const& tCrB,  // (MMA, MMA_N, MMA_K): descriptors
                            Acc& acc) {         // (MMA, MMA_M, MMA_N)
  CUTE_STATIC_ASSERT_V(size<1>(tCrA) == size<1>(acc));
  CUTE_STATIC_ASSERT_V(size<1>(tCrB) == size<2>(acc));
  CUTE_STATIC_ASSERT_V(size<2>(tCrA) == size<2>(tCrB));
  static_assert(kShare.index < kShare.of && decltype(size<2>(tCrA))::value % kShare.of == 0);
  constexpr int kSteps = decltype(size<2>(tCrA))::value / kShare.of;
  constexpr bool kAInRegs = !std::is_base_of_v<SM90::GMMA::DescriptorIterator, typename Mma::FrgTypeA>;
  if constexpr (kAInRegs) warpgroup_fence_operand(tCrA);
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  mma.accumulate_ =
      kAccumulate == Accumulate::kOverwrite ? SM90::GMMA::ScaleOut::Zero : SM90::GMMA::ScaleOut::One;
  CUTE_UNROLL
  for (int k = kShare.index * kSteps; k < (kShare.index + 1) * kSteps; ++k) {
    cute::gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
    mma.accumulate_ = SM90::GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(acc);
  if constexpr (kAInRegs) warpgroup_fence_operand(tCrA);
}

// The same for a whole GEMM with A's first kRegSteps k steps in registers (RS) and the others in shared memory (SS).
template <Accumulate kAccumulate, int kRegSteps, class MmaRs, class Mma, class FragARegs, class FragA, class FragB,
          class Acc>
CUTE_DEVICE void issue_gemm_rs_ss(MmaRs& mma_rs, FragARegs& tCrA_regs,  // (MMA, MMA_M, MMA_K): registers
                                  Mma& mma, FragA const& tCrA,          // (MMA, MMA_M, MMA_K): descriptors
                                  FragB const& tCrB,                    // (MMA, MMA_N, MMA_K): descriptors
                                  Acc& acc) {                           // (MMA, MMA_M, MMA_N)
  static_assert(0 < kRegSteps && kRegSteps <= decltype(size<2>(tCrA))::value);
  CUTE_STATIC_ASSERT_V(size<1>(tCrA_regs) == size<1>(tCrA));
  CUTE_STATIC_ASSERT_V(size<1>(tCrA) == size<1>(acc));
  CUTE_STATIC_ASSERT_V(size<1>(tCrB) == size<2>(acc));
  CUTE_STATIC_ASSERT_V(size<2>(tCrA_regs) == size<2>(tCrA));
  CUTE_STATIC_ASSERT_V(size<2>(tCrA) == size<2>(tCrB));
  auto fence_regs = [&] {
    for_each(make_int_sequence<kRegSteps>{}, [&](auto k) {
      auto tCrA_k = tCrA_regs(_, _, k);  // (MMA, MMA_M)
      warpgroup_fence_operand(tCrA_k);
    });
  };
  fence_regs();
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  mma_rs.accumulate_ =
      kAccumulate == Accumulate::kOverwrite ? SM90::GMMA::ScaleOut::Zero : SM90::GMMA::ScaleOut::One;
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
