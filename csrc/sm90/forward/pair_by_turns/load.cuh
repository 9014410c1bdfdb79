// The producer: one thread loads Q, the own key tiles' K and this CTA's columns of V by TMA, in the order in which the
// consumers read them.
#pragma once

#include "sm90/forward/pair/load.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::pair_by_turns {

using forward::KernelArgs;
using pair::KeyWalk;
using pair::load_box;
using pair::TileOrigin;

template <class Traits>
struct Loader {
  using Element = typename Traits::Element;

  KernelArgs const& args;
  typename Traits::SharedStorage& smem;
  PipelineState<kUnits> state{};

  CUTE_DEVICE void load_q(TileOrigin const& tile) {
    PipelineState<1> const q_state{0, tile.tile_number & 1};
    smem.q_pipeline.wait_empty(q_state);  // all consumer warps have finished the last tile's S
    int const chunks = chunks_of_k(args.params);
    uint64_t* const full = smem.q_pipeline.expect(q_state, chunks * kBlockM * kChunk * sizeof(Element));
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      CUTE_UNROLL
      for (int warpgroup = 0; warpgroup < Traits::kWarpgroups; ++warpgroup) {
        load_box(args.q, full, TMA::CacheHintSm90::EVICT_FIRST, smem.q[warpgroup] + chunk * kRows * kChunk,
                 chunk * kChunk, tile.first_row + warpgroup * kRows, tile.head, tile.rows);
      }
    }
  }

  CUTE_DEVICE uint64_t* next_unit() {
    smem.ring.wait_empty(state);  // both warpgroups have read the unit that was there
    return smem.ring.expect(state, kUnitElements * sizeof(Element));
  }

  CUTE_DEVICE void load_k(int key, TileOrigin const& tile) {
    int const chunks = chunks_of_k(args.params);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk, state.advance()) {
      uint64_t* const full = next_unit();
      load_box(args.k, full, TMA::CacheHintSm90::EVICT_LAST, smem.units[state.stage], chunk * kChunk, key, tile.head_kv,
               tile.keys);
    }
  }

  CUTE_DEVICE void load_v(int key, TileOrigin const& tile) {
#pragma unroll 1
    for (int unit = 0; unit < kUnitsOfV; ++unit, state.advance()) {
      uint64_t* const full = next_unit();
      load_box(args.v, full, TMA::CacheHintSm90::EVICT_LAST, smem.units[state.stage],
               pair::rank_in_pair() * kColumns + unit * kChunk, key, tile.head_kv, tile.keys);
    }
  }

  CUTE_DEVICE void load(TileOrigin const& tile, KeyWalk const& walk) {
    int const steps = walk.steps, rank = pair::rank_in_pair(), announced_at = max(0, steps - forward::kTilesAhead);
    bool announced = false;
    auto const first_key = [&](int i) { return walk.tile(i) * kBlockN; };
    auto const announce = [&] {
      if (!announced) smem.next_tile.publish({0, tile.tile_number & 1});
      announced = true;
    };
#pragma unroll 1
    for (int i = rank; i < steps; i += 2) {
      if (i >= announced_at) announce();
      if (i == rank) load_q(tile);
      load_k(first_key(i), tile);
      if (i > 0) load_v(first_key(i - 1), tile);
      load_v(first_key(i), tile);
    }
    announce();
    if (rank >= steps) load_q(tile);
    if (steps > 0 && ((steps - 1) & 1) != rank) load_v(first_key(steps - 1), tile);
  }
};

}  // namespace flash_cute::sm90::forward::pair_by_turns
