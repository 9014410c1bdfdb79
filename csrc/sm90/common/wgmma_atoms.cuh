// WGMMA m64nNk16, both operands in shared memory and K-major, for the values of N that CuTe has only with a macro that
// quadruples the compile time of its headers (7 to 29 s).
#pragma once

#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

namespace flash_cute::sm90 {

template <class Element, int N>
struct WgmmaSS {
  using DRegisters = void;
  using ARegisters = uint64_t[1];
  using BRegisters = uint64_t[1];
  using CRegisters = float[N / 2];

  CUTE_DEVICE static void fma(uint64_t a, uint64_t b, float* d, int accumulate);
};

// Eight accumulator registers each: FC_D* as operand numbers in the PTX text, FC_8 as operands of the asm statement.
#define FC_D0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FC_D1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FC_D2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define FC_D3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define FC_D4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FC_D5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define FC_D6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FC_TEXT24 FC_D0 FC_D1 FC_D2
#define FC_TEXT40 FC_TEXT24 FC_D3 FC_D4
#define FC_TEXT56 FC_TEXT40 FC_D5 FC_D6
#define FC_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FC_8(i) FC_4(i), FC_4(i + 4)
#define FC_OPERANDS24 FC_8(0), FC_8(8), FC_8(16)
#define FC_OPERANDS40 FC_OPERANDS24, FC_8(24), FC_8(32)
#define FC_OPERANDS56 FC_OPERANDS40, FC_8(40), FC_8(48)

// REGS = N / 2 accumulator registers; A, B, P: the operand numbers of the two descriptors and of `accumulate`.
#define FC_WGMMA_SS(N, REGS, A, B, P, ELEMENT, TYPE)                                                                   \
  template <>                                                                                                          \
  CUTE_DEVICE void WgmmaSS<ELEMENT, N>::fma(uint64_t a, uint64_t b, float* d, int accumulate) {                        \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " P ", 0;\n"                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FC_TEXT##REGS "}, " A ", " B     \
                 ", p, 1, 1, 0, 0; }\n"                                                                                \
                 : FC_OPERANDS##REGS                                                                                   \
                 : "l"(a), "l"(b), "r"(accumulate));                                                                   \
  }
#define FC_WGMMA_SS_BOTH(N, REGS, A, B, P)                \
  FC_WGMMA_SS(N, REGS, A, B, P, cutlass::half_t, "f16")   \
  FC_WGMMA_SS(N, REGS, A, B, P, cutlass::bfloat16_t, "bf16")

FC_WGMMA_SS_BOTH(48, 24, "%24", "%25", "%26")
FC_WGMMA_SS_BOTH(80, 40, "%40", "%41", "%42")
FC_WGMMA_SS_BOTH(112, 56, "%56", "%57", "%58")

#undef FC_WGMMA_SS
#undef FC_WGMMA_SS_BOTH

// The atom for N: CuTe's where it has one.
template <class Element, int N>
constexpr auto wgmma_ss_atom() {
  if constexpr (N == 48 || N == 80 || N == 112) {
    return WgmmaSS<Element, N>{};
  } else {
    using namespace cute;
    return SM90::GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<N>, _16>, SM90::GMMA::Major::K,
                                      SM90::GMMA::Major::K>();
  }
}

// The same with both operands MN-major.
template <class Element, int N>
constexpr auto wgmma_ss_atom_mn() {
  using namespace cute;
  return SM90::GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<N>, _16>, SM90::GMMA::Major::MN,
                                    SM90::GMMA::Major::MN>();
}

}  // namespace flash_cute::sm90

namespace cute {

template <class Element, int N>
struct MMA_Traits<flash_cute::sm90::WgmmaSS<Element, N>> {
  using ValTypeD = float;
  using ValTypeA = Element;
  using ValTypeB = Element;
  using ValTypeC = float;
  using FrgTypeA = SM90::GMMA::smem_desc<SM90::GMMA::Major::K>;
  using FrgTypeB = SM90::GMMA::smem_desc<SM90::GMMA::Major::K>;
  using Shape_MNK = Shape<_64, Int<N>, _16>;
  using ThrID = Layout<_128>;
  using ALayout = SM90::GMMA::ABLayout<64, 16>;
  using BLayout = SM90::GMMA::ABLayout<N, 16>;
  using CLayout = SM90::GMMA::CLayout_64xN<N>;

  SM90::GMMA::ScaleOut accumulate_ = SM90::GMMA::ScaleOut::One;
};

template <class Element, int N, class TD, class LD, class TA, class LA, class TB, class LB, class TC, class LC>
CUTE_DEVICE void mma_unpack(MMA_Traits<flash_cute::sm90::WgmmaSS<Element, N>> const& traits, Tensor<TD, LD>& D,
                            Tensor<TA, LA> const& A, Tensor<TB, LB> const& B, Tensor<TC, LC> const&) {
  static_assert(cosize_v<LD> == N / 2);
  flash_cute::sm90::WgmmaSS<Element, N>::fma(recast<uint64_t>(A)(0), recast<uint64_t>(B)(0),
                                             raw_pointer_cast(D.data()), int(traits.accumulate_));
}

}  // namespace cute
