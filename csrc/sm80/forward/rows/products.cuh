// The two products of the mainloop with float32 accumulators. float16_products.cuh has the same functions.
#pragma once

#include <cute/tensor.hpp>

#include "core/softmax.cuh"
#include "sm80/common/gemm.cuh"

namespace flash_cute::sm80::forward::rows {

using namespace cute;

struct Float32Products {
  static constexpr bool kScalesQ = false;

  template <int kRows, PowerScale kPowerScale>
  CUTE_DEVICE static auto make_softmax(float scale_log2, float power_scale) {
    return OnlineSoftmax<kRows, kRows == 2, kPowerScale>(scale_log2, power_scale);
  }

  // S = Q K^T. fetch(k) loads what k step k needs.
  template <class Mma, class Scores, class FragQ, class FragK, class Fetch>
  CUTE_DEVICE static void multiply_qk(Mma const& mma,
                                      Scores& tSrS,       // (MMA, MMA_M, MMA_N)
                                      FragQ const& tSrQ,  // (MMA, MMA_M, MMA_D)
                                      FragK const& tSrK,  // (MMA, MMA_N, MMA_D)
                                      Fetch const& fetch) {
    clear(tSrS);
    pipelined_gemm(mma, tSrS, tSrQ, tSrK, fetch);
  }

  // O += P V. fetch(d, k) loads V's fragment d of k step k; `_` for all of them.
  template <class Mma, class Acc, class FragP, class FragV, class Fetch>
  CUTE_DEVICE static void multiply_pv(Mma const& mma,
                                      Acc& tOrO,          // (MMA, MMA_M, MMA_D)
                                      FragP const& tOrP,  // (MMA, MMA_M, MMA_N)
                                      FragV const& tOrV,  // (MMA, MMA_D, MMA_N)
                                      Fetch const& fetch) {
    pipelined_gemm(mma, tOrO, tOrP, tOrV, [&](int k) { fetch(_, k); });
  }
};

}  // namespace flash_cute::sm80::forward::rows
