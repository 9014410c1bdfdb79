// The products O += P V of the forwards for large head dims: a WGMMA group reads one unit, some keys of V and some of
// its columns.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

namespace flash_cute::sm90::forward::pair {

using namespace cute;

// Adds to acc the product of A's k steps from kFirst on and one unit.
template <int kFirst = 0, class Mma, class FragA, class FragB, class Acc>
CUTE_DEVICE void issue_unit(Mma& mma,
                            FragA& tCrA,        // (MMA, MMA_M, MMA_K): registers or descriptors
                            FragB const& tCrB,  // (MMA, MMA_N, MMA_K of the unit): descriptors
                            Acc& acc) {         // (MMA, MMA_M, MMA_N)
  CUTE_STATIC_ASSERT_V(size<1>(tCrA) == size<1>(acc));
  CUTE_STATIC_ASSERT_V(size<1>(tCrB) == size<2>(acc));
  mma.accumulate_ = SM90::GMMA::ScaleOut::One;
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrB); ++k) cute::gemm(mma, tCrA(_, _, kFirst + k), tCrB(_, _, k), acc);
}

// One N step of the accumulator.
template <int kPart, class Accumulator>
CUTE_DEVICE auto part_of_columns(Accumulator& acc) {  // (MMA, MMA_M, MMA_N)
  auto part = acc(_, _, Int<kPart>{});                // (MMA, MMA_M)
  return make_tensor(part.data(), append<3>(part.layout(), Layout<_1, _0>{}));
}

// Calls use(_0{}) to use(Int<kEnd - 1>{}). The compiler may leave a call in for_each, and would wait for the WGMMAs
// before it.
template <int kEnd, int kFirst = 0, class Use>
CUTE_DEVICE void static_for(Use const& use) {
  if constexpr (kFirst < kEnd) {
    use(Int<kFirst>{});
    static_for<kEnd, kFirst + 1>(use);
  }
}

}  // namespace flash_cute::sm90::forward::pair
