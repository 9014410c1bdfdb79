// The loop of mainloop.cuh for a CTA of a pair: W of every second tile comes from the partner.
#pragma once

#include "mainloop.cuh"

namespace flash_cute::sm80::backward::streamed {

// W of the partner's tile to shared memory, if it has one.
template <class Traits, Side kSide>
CUTE_DEVICE void receive_weights(typename Traits::Storage& smem, Exchange const& partner,
                                 PairTurns<typename Traits::Storage, kSide> const& turns) {
  using Tile = Shape<Int<kTileRows>, Int<kOtherRows>>;
  Pair const pair = partner.at_turn(turns.turn());
  pair.wait(fresh_thread_index());  // and no warp reads this CTA's own W any more
  if (!turns.has_tile()) return;
  auto rW = make_tensor_like<typename Traits::Element>(partition_fragment_C(typename Traits::ScoreMma{}, Tile{}));
  streaming::load_message(pair.other().weights, fresh_thread_index(), rW);  // (4, 2, 4)
  streaming::store_weights(rW, cast_smem_ptr_to_uint(smem.weights), fresh_thread_index());
}

template <class Traits, Side kSide, class Out>
CUTE_DEVICE void mainloop(BwdParams const& params, typename Traits::Storage& smem, streaming::Pipeline& pipeline,
                          Loader<Traits, kSide>& load, streaming::LeftChunks const& left, Exchange const& partner,
                          Out& out) {  // (4, 4, kOutBlocks)
  auto const& task = smem.task;
  uint32_t const weights = cast_smem_ptr_to_uint(smem.weights);
  int const columns = task.x.columns;
  if constexpr (kSide == Side::kQueries) {
    load_statistics<kTileRows>(params, smem, task.head, task.tile * kTileRows, fresh_thread_index());
  }

  PairTurns<typename Traits::Storage, kSide> turns(smem);
#pragma unroll 1
  do {
    if (turns.is_own()) {
      if (turns.has_tile()) {
        auto const rW = compute_weights<Traits, kSide>(params, smem, pipeline, load, left, turns.head(),
                                                       turns.tile());  // (4, 2, 4)
        if (partner.exists()) {
          streaming::store_message(rW, partner.at_turn(turns.turn()).own().weights, fresh_thread_index());
        }
      }
      if (partner.exists()) partner.at_turn(turns.turn()).send(fresh_thread_index());
    } else {
      receive_weights<Traits>(smem, partner, turns);
    }
    if (turns.has_tile()) add_product<Traits, kSide>(smem, pipeline, load, weights, columns, turns.tile(), out);
  } while (turns.advance());
}

}  // namespace flash_cute::sm80::backward::streamed
