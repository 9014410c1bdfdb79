// The GEMMs of a step. Scores are computed transposed, (keys, rows), so that a thread's C fragments of P^T and dS^T are
// its A fragments for dV and dK. Each thread's addresses in shared memory are recomputed from its index at each call:
// kept in registers, they spilled.
//
// They are templates of the schedule, though they read only its traits, so that each kernel has its own: a function
// that two kernels share is inlined differently.
#pragma once

#include <cute/tensor.hpp>

#include "core/layout.cuh"
#include "core/registers.cuh"
#include "schedule.cuh"
#include "traits.cuh"
#include "sm80/common/gemm.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

// S^T = K Q^T or dP^T = V dO^T, for one part of a row tile.
template <class Schedule, class SmemA, class SmemB, class Accumulator>
__device__ inline void scores_product(SmemA const& sA,      // (BLK_N, D)
                                      SmemB const& sB,      // (BLK_M / parts, D)
                                      Accumulator& tSrS) {  // (MMA, MMA_N, MMA_M)
  using Traits = typename Schedule::Traits;
  using Element = typename Traits::Element;
  CUTE_STATIC_ASSERT_V(size<0>(sA) == Int<Traits::kBlockN>{} && size<0>(sB) == Int<Traits::kScoreRows>{});
  CUTE_STATIC_ASSERT_V(size<1>(sA) == Int<Traits::kHeadDim>{} && size<1>(sB) == Int<Traits::kHeadDim>{});
  typename Traits::MmaScores mma;
  auto const tiled_copy_a = make_tiled_copy_A(typename Traits::SmemCopyAtom{}, mma);
  auto const tiled_copy_b = make_tiled_copy_B(typename Traits::SmemCopyAtom{}, mma);
  int const thread = fresh_thread_index();
  auto const copy_a = tiled_copy_a.get_slice(thread);
  auto const copy_b = tiled_copy_b.get_slice(thread);
  auto tSrA = fragment_a<Element>(mma, make_shape(size<0>(sA), size<1>(sA)));  // (MMA, MMA_N, MMA_D)
  auto tSrB = fragment_b<Element>(mma, make_shape(size<0>(sB), size<1>(sB)));  // (MMA, MMA_M, MMA_D)
  auto tSsA = copy_a.partition_S(sA);                                          // (CPY, CPY_N, CPY_D)
  auto tSsB = copy_b.partition_S(sB);                                          // (CPY, CPY_M, CPY_D)
  auto tSrA_copy = copy_a.retile_D(tSrA);                                      // (CPY, CPY_N, CPY_D)
  auto tSrB_copy = copy_b.retile_D(tSrB);                                      // (CPY, CPY_M, CPY_D)
  CUTE_STATIC_ASSERT_V(size<1>(tSsA) == size<1>(tSrA_copy) && size<2>(tSsA) == size<2>(tSrA_copy));
  CUTE_STATIC_ASSERT_V(size<1>(tSsB) == size<1>(tSrB_copy) && size<2>(tSsB) == size<2>(tSrB_copy));
  clear(tSrS);
  pipelined_gemm(mma, tSrS, tSrA, tSrB, [&](int k) {
    copy(tiled_copy_a, tSsA(_, _, k), tSrA_copy(_, _, k));
    copy(tiled_copy_b, tSsB(_, _, k), tSrB_copy(_, _, k));
  });
}

// dV += P^T dO or dK += dS^T Q, for one part of a row tile. P^T or dS^T is in registers, where prepare(k) puts what k
// step k needs.
template <class Schedule, class FragA, class SmemB, class Accumulator, class Prepare>
__device__ inline void keys_product_rs(FragA const& tCrA,  // (MMA, MMA_N, MMA_M)
                                       SmemB const& sB,    // (D, BLK_M / parts)
                                       Accumulator& acc,   // (MMA, MMA_N, MMA_D)
                                       Prepare&& prepare) {
  using Traits = typename Schedule::Traits;
  using Element = typename Traits::Element;
  CUTE_STATIC_ASSERT_V(size<0>(sB) == Int<Traits::kHeadDim>{} && size<1>(sB) == Int<Traits::kScoreRows>{});
  typename Traits::MmaKeys mma;
  auto const tiled_copy_b = make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, mma);
  auto const copy_b = tiled_copy_b.get_slice(Schedule::thread_index());
  auto tCrB = fragment_b<Element>(mma, make_shape(size<0>(sB), size<1>(sB)));  // (MMA, MMA_D, MMA_M)
  auto tCsB = copy_b.partition_S(sB);                                          // (CPY, CPY_D, CPY_M)
  auto tCrB_copy = copy_b.retile_D(tCrB);                                      // (CPY, CPY_D, CPY_M)
  CUTE_STATIC_ASSERT_V(size<1>(tCsB) == size<1>(tCrB_copy) && size<2>(tCsB) == size<2>(tCrB_copy));
  pipelined_gemm(mma, acc, tCrA, tCrB, [&](int k) {
    prepare(k);
    copy(tiled_copy_b, tCsB(_, _, k), tCrB_copy(_, _, k));
  });
}

// The same with P^T or dS^T in shared memory. beside(k) runs beside the loads of k step k.
template <class Schedule, class SmemA, class SmemB, class Accumulator, class Beside>
__device__ inline void keys_product_ss(SmemA const& sA,   // (BLK_N, BLK_M / parts)
                                       SmemB const& sB,   // (D, BLK_M / parts)
                                       Accumulator& acc,  // (MMA, MMA_N, MMA_D)
                                       Beside&& beside) {
  using Traits = typename Schedule::Traits;
  using Element = typename Traits::Element;
  CUTE_STATIC_ASSERT_V(size<0>(sA) == Int<Traits::kBlockN>{} && size<1>(sA) == Int<Traits::kScoreRows>{});
  typename Traits::MmaKeys mma;
  auto const tiled_copy_a = make_tiled_copy_A(typename Traits::SmemCopyAtom{}, mma);
  auto const copy_a = tiled_copy_a.get_slice(Schedule::thread_index());
  auto tCrA = fragment_a<Element>(mma, make_shape(size<0>(sA), size<1>(sA)));  // (MMA, MMA_N, MMA_M)
  auto tCsA = copy_a.partition_S(sA);                                          // (CPY, CPY_N, CPY_M)
  auto tCrA_copy = copy_a.retile_D(tCrA);                                      // (CPY, CPY_N, CPY_M)
  CUTE_STATIC_ASSERT_V(size<1>(tCsA) == size<1>(tCrA_copy) && size<2>(tCsA) == size<2>(tCrA_copy));
  keys_product_rs<Schedule>(tCrA, sB, acc, [&](int k) {
    copy(tiled_copy_a, tCsA(_, _, k), tCrA_copy(_, _, k));
    beside(k);
  });
}

// dQ = dS K for a whole row tile, (MMA, MMA_M, MMA_D).
template <class Schedule, class SmemA, class SmemB>
__device__ inline auto queries_product(SmemA const& sdS,    // (BLK_M, BLK_N)
                                       SmemB const& sKt) {  // (D, BLK_N)
  using Traits = typename Schedule::Traits;
  using Element = typename Traits::Element;
  CUTE_STATIC_ASSERT_V(size<1>(sdS) == size<1>(sKt));
  typename Traits::MmaQueries mma;
  auto const tiled_copy_a = make_tiled_copy_A(typename Traits::SmemCopyAtomTransposed{}, mma);
  auto const tiled_copy_b = make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, mma);
  auto tdQrdQ = partition_fragment_C(mma, make_shape(size<0>(sdS), size<0>(sKt)));  // (MMA, MMA_M, MMA_D)
  auto tdQrdS = fragment_a<Element>(mma, make_shape(size<0>(sdS), size<1>(sdS)));   // (MMA, MMA_M, MMA_N)
  auto tdQrK = fragment_b<Element>(mma, make_shape(size<0>(sKt), size<1>(sKt)));    // (MMA, MMA_D, MMA_N)
  int const thread = Schedule::thread_index();
  auto const copy_a = tiled_copy_a.get_slice(thread);
  auto const copy_b = tiled_copy_b.get_slice(thread);
  auto tdQsdS = copy_a.partition_S(sdS);       // (CPY, CPY_M, CPY_N)
  auto tdQsK = copy_b.partition_S(sKt);        // (CPY, CPY_D, CPY_N)
  auto tdQrdS_copy = copy_a.retile_D(tdQrdS);  // (CPY, CPY_M, CPY_N)
  auto tdQrK_copy = copy_b.retile_D(tdQrK);    // (CPY, CPY_D, CPY_N)
  CUTE_STATIC_ASSERT_V(size<1>(tdQsdS) == size<1>(tdQrdS_copy) && size<2>(tdQsdS) == size<2>(tdQrdS_copy));
  CUTE_STATIC_ASSERT_V(size<1>(tdQsK) == size<1>(tdQrK_copy) && size<2>(tdQsK) == size<2>(tdQrK_copy));
  clear(tdQrdQ);
  pipelined_gemm(mma, tdQrdQ, tdQrdS, tdQrK, [&](int k) {
    copy(tiled_copy_a, tdQsdS(_, _, k), tdQrdS_copy(_, _, k));
    copy(tiled_copy_b, tdQsK(_, _, k), tdQrK_copy(_, _, k));
  });
  return tdQrdQ;
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
