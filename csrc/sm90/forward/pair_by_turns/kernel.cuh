// The Hopper forward for head dims above those of rows/, up to 512: persistent clusters of two CTAs with 128 query
// rows, a producer warpgroup and two consumer warpgroups of 64 rows. A row's accumulator is too large for the registers
// of one warpgroup, so that each CTA has half of its columns; the scores of the key tiles they compute by turns, see
// mainloop.cuh. Of the producer warpgroup one thread issues the TMA loads, and another warp schedules the tiles, as in
// rows/ where sequences are read at run time.
#pragma once

#include "sm90/forward/pair/kernel.cuh"
#include "load.cuh"
#include "mainloop.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::pair_by_turns {

template <class Traits>
CUTE_DEVICE void consumer(KernelArgs const& args, typename Traits::SharedStorage& smem, int warpgroup) {
  RingStates states;
  Messages<Traits> messages{smem, warpgroup, uniform(threadIdx.x / 32 % 4)};
  auto const compute = [&](int tile_number, OnlineSoftmax<2>& softmax, auto& tOrO) __attribute__((always_inline)) {
    mainloop<Traits>(args.params, tile_number, warpgroup, smem, states, messages, softmax, tOrO);
  };
  auto const store = [&](pair::RowTile const& tile, forward::TileCoord const& coord, Sequence const& sequence,
                         auto const& softmax, auto const& mma, auto& tOrO) __attribute__((always_inline)) {
    int const first_row = coord.m_block * kBlockM + warpgroup * kRows;
    pair::store_columns<typename Traits::Element, kRows, kColumns>(
        args.params, sequence, coord, first_row, pair::rank_in_pair() * kColumns, softmax, mma, tOrO);
    if (tile.keys.begin < tile.keys.end) messages.release_sums();
  };
  pair::for_each_tile<Traits, kColumns>(args.params, smem, compute, store);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fwd_pair_by_turns_kernel(__grid_constant__ KernelArgs const args) {
  using Storage = typename Traits::SharedStorage;
  auto const load = [&](Storage& smem) __attribute__((always_inline)) {
    if (threadIdx.x == 0) pair::produce<Traits>(args, smem, Loader<Traits>{args, smem});
  };
  pair::run_cta<Traits>(args, load, [&](Storage& smem, int warpgroup) __attribute__((always_inline)) {
    consumer<Traits>(args, smem, warpgroup);
  });
}

}  // namespace flash_cute::sm90::forward::pair_by_turns
