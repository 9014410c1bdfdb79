// The Hopper forward for head dims above 512: persistent clusters of two CTAs with 64 query rows, each of which has
// half of the columns (see exchange.cuh), a producer warpgroup and two consumer warpgroups. The accumulator is too
// large for the registers of one warpgroup, so that each has half of its columns; the scores of the key tiles they
// compute by turns, see mainloop.cuh. Of the producer warpgroup three threads issue the TMA loads, one for each ring,
// and another warp schedules the tiles, as in rows/ where sequences are read at run time.
#pragma once

#include "sm90/forward/pair/kernel.cuh"
#include "load.cuh"
#include "mainloop.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::pair_by_columns {

template <class Traits, int kParts>
CUTE_DEVICE void consumer(KernelArgs const& args, typename Traits::SharedStorage& smem, int warpgroup) {
  constexpr int kHalf = kParts * kUnitColumnsOfV;  // columns of O
  RingStates states;
  Messages<Traits> messages{smem, warpgroup};
  ScoreExchange<Traits> exchange{smem, warpgroup};
  auto const compute = [&](int tile_number, OnlineSoftmax<2>& softmax, auto& tOrO) __attribute__((always_inline)) {
    mainloop<Traits, kParts>(args.params, tile_number, warpgroup, smem, states, messages, exchange, softmax, tOrO);
  };
  auto const store = [&](pair::RowTile const&, forward::TileCoord const& coord, Sequence const& sequence,
                         auto const& softmax, auto const& mma, auto& tOrO) __attribute__((always_inline)) {
    int const first_column = (kWarpgroups * pair::rank_in_pair() + warpgroup) * kHalf;
    pair::store_columns<typename Traits::Element, kBlockM, kHalf>(
        args.params, sequence, coord, coord.m_block * kBlockM, first_column, softmax, mma, tOrO);
  };
  pair::for_each_tile<Traits, kHalf>(args.params, smem, compute, store);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fwd_pair_by_columns_kernel(__grid_constant__ KernelArgs const args) {
  using Storage = typename Traits::SharedStorage;
  auto const load = [&](Storage& smem) __attribute__((always_inline)) {
    if (threadIdx.x == 0) pair::produce<Traits>(args, smem, KeyLoader<Traits>{args, smem});
    if (threadIdx.x == 64) pair::produce<Traits>(args, smem, ValueLoader<Traits, 0>{args, smem});
    if (threadIdx.x == 96) pair::produce<Traits>(args, smem, ValueLoader<Traits, 1>{args, smem});
  };
  pair::run_cta<Traits>(args, load, [&](Storage& smem, int warpgroup) __attribute__((always_inline)) {
    if (parts_of_v(args.params) == 1) {
      consumer<Traits, 1>(args, smem, warpgroup);
    } else {
      consumer<Traits, 2>(args, smem, warpgroup);
    }
  });
}

}  // namespace flash_cute::sm90::forward::pair_by_columns
