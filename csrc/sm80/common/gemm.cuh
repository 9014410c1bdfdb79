// GEMMs of one tile by mma.sync, with operands in shared memory or registers.
#pragma once

#include <cute/tensor.hpp>

namespace flash_cute::sm80 {

using namespace cute;

// acc += A B. fetch(k) loads what k step k needs into the operands' registers, one step ahead of its MMA.
template <class Mma, class Acc, class FragA, class FragB, class Fetch>
CUTE_DEVICE void pipelined_gemm(Mma const& mma,
                                Acc& acc,           // (MMA, MMA_M, MMA_N)
                                FragA const& tCrA,  // (MMA, MMA_M, MMA_K)
                                FragB const& tCrB,  // (MMA, MMA_N, MMA_K)
                                Fetch&& fetch) {
  CUTE_STATIC_ASSERT_V(size<1>(acc) == size<1>(tCrA));
  CUTE_STATIC_ASSERT_V(size<2>(acc) == size<1>(tCrB));
  CUTE_STATIC_ASSERT_V(size<2>(tCrA) == size<2>(tCrB));
  fetch(0);
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrA); ++k) {
    if (k + 1 < size<2>(tCrA)) fetch(k + 1);
    cute::gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
  }
}

}  // namespace flash_cute::sm80
