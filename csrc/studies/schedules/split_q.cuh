// split_q: each warp owns whole rows of Q, S, P and O, and reads all of K and V. The library's own kernel, with one or
// two stages of K and V.
#pragma once

#include "sm80/forward/rows/epilogue.cuh"
#include "sm80/forward/rows/mainloop.cuh"
#include "traits.cuh"

namespace flash_cute::studies::schedules {

struct SplitQ {
  template <class Traits>
  CUTE_DEVICE static void compute_tile(FwdParams const& params, RowTileCoord const& tile, int /*part*/,
                                       typename Traits::Storage& smem) {
    typename Traits::Mma mma;
    auto tOrO = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});
    clear(tOrO);  // (MMA, MMA_M, MMA_D)
    OnlineSoftmax<2 * decltype(size<1>(tOrO))::value> softmax(params.scale_log2, params.power_scale);
    rows::mainloop<Traits>(params, params, tile, smem, softmax, tOrO);
    rows::epilogue<Traits>(params, params, tile, smem, softmax, tOrO);
  }
};

}  // namespace flash_cute::studies::schedules
