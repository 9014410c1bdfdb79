// WGMMA m64nNk32 of float8, e4m3 in registers times a K-major operand in shared memory, for the values of N that CuTe
// has only with a macro that quadruples the compile time of its headers: a head dim and 8 more.
#pragma once

#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

namespace flash_cute::sm90::forward::fp8_rows {

template <class ElementB, int N>
struct WgmmaRS {
  using DRegisters = void;
  using ARegisters = uint32_t[4];
  using BRegisters = uint64_t[1];
  using CRegisters = float[N / 2];

  CUTE_DEVICE static void fma(uint32_t const (&a)[4], uint64_t b, float* d, int accumulate);
};

// Accumulator registers: FC_NUMBERS* as operand numbers in the PTX text, FC_4 and FC_16 as operands of the asm
// statement.
#define FC_NUMBERS0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define FC_NUMBERS1 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FC_NUMBERS2 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define FC_NUMBERS3 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define FC_TEXT36 FC_NUMBERS0 FC_NUMBERS1 ",%32,%33,%34,%35"
#define FC_TEXT52 FC_NUMBERS0 FC_NUMBERS1 FC_NUMBERS2 ",%48,%49,%50,%51"
#define FC_TEXT68 FC_NUMBERS0 FC_NUMBERS1 FC_NUMBERS2 FC_NUMBERS3 ",%64,%65,%66,%67"
#define FC_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FC_16(i) FC_4(i), FC_4(i + 4), FC_4(i + 8), FC_4(i + 12)
#define FC_OPERANDS36 FC_16(0), FC_16(16), FC_4(32)
#define FC_OPERANDS52 FC_16(0), FC_16(16), FC_16(32), FC_4(48)
#define FC_OPERANDS68 FC_16(0), FC_16(16), FC_16(32), FC_16(48), FC_4(64)

// REGS = N / 2 accumulator registers; A, B, P: the operand numbers of A's four registers, B's descriptor and
// `accumulate`.
#define FC_WGMMA_RS(N, REGS, A, B, P, ELEMENT, TYPE)                                                             \
  template <>                                                                                                    \
  CUTE_DEVICE void WgmmaRS<ELEMENT, N>::fma(uint32_t const(&a)[4], uint64_t b, float* d, int accumulate) {       \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " P ", 0;\n"                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3." TYPE " {" FC_TEXT##REGS "}, {" A "}, " B \
                 ", p, 1, 1; }\n"                                                                                \
                 : FC_OPERANDS##REGS                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                         \
  }
#define FC_WGMMA_RS_BOTH(N, REGS, A, B, P)                       \
  FC_WGMMA_RS(N, REGS, A, B, P, cutlass::float_e4m3_t, "e4m3")   \
  FC_WGMMA_RS(N, REGS, A, B, P, cutlass::float_e5m2_t, "e5m2")

FC_WGMMA_RS_BOTH(72, 36, "%36,%37,%38,%39", "%40", "%41")
FC_WGMMA_RS_BOTH(104, 52, "%52,%53,%54,%55", "%56", "%57")
FC_WGMMA_RS_BOTH(136, 68, "%68,%69,%70,%71", "%72", "%73")

#undef FC_WGMMA_RS
#undef FC_WGMMA_RS_BOTH

// The atom for N: CuTe's where it has one.
template <class ElementB, int N>
constexpr auto wgmma_rs_atom() {
  if constexpr (N == 72 || N == 104 || N == 136) {
    return WgmmaRS<ElementB, N>{};
  } else {
    using namespace cute;
    return SM90::GMMA::rs_op_selector<cutlass::float_e4m3_t, ElementB, float, Shape<_64, Int<N>, _32>>();
  }
}

}  // namespace flash_cute::sm90::forward::fp8_rows

namespace cute {

template <class ElementB, int N>
struct MMA_Traits<flash_cute::sm90::forward::fp8_rows::WgmmaRS<ElementB, N>> {
  using ValTypeD = float;
  using ValTypeA = cutlass::float_e4m3_t;
  using ValTypeB = ElementB;
  using ValTypeC = float;
  using FrgTypeB = SM90::GMMA::smem_desc<SM90::GMMA::Major::K>;
  using Shape_MNK = Shape<_64, Int<N>, _32>;
  using ThrID = Layout<_128>;
  using ALayout = SM90::GMMA::ALayout_64x32;
  using BLayout = SM90::GMMA::ABLayout<N, 32>;
  using CLayout = SM90::GMMA::CLayout_64xN<N>;

  SM90::GMMA::ScaleOut accumulate_ = SM90::GMMA::ScaleOut::One;
};

template <class ElementB, int N, class TD, class LD, class TA, class LA, class TB, class LB, class TC, class LC>
CUTE_DEVICE void mma_unpack(MMA_Traits<flash_cute::sm90::forward::fp8_rows::WgmmaRS<ElementB, N>> const& traits,
                            Tensor<TD, LD>& D, Tensor<TA, LA> const& A, Tensor<TB, LB> const& B,
                            Tensor<TC, LC> const&) {
  static_assert(cosize_v<LD> == N / 2);
  auto const words = recast<uint32_t>(A);
  CUTE_STATIC_ASSERT_V(size(words) == _4{});
  uint32_t const a[4] = {words(0), words(1), words(2), words(3)};
  flash_cute::sm90::forward::fp8_rows::WgmmaRS<ElementB, N>::fma(a, recast<uint64_t>(B)(0), raw_pointer_cast(D.data()),
                                                                 int(traits.accumulate_));
}

}  // namespace cute
