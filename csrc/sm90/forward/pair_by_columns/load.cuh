// The producers: three threads load by TMA what the consumers read, each through a ring of its own: K, and Q; one half
// of the columns of V; the other.
#pragma once

#include "sm90/forward/pair/load.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::pair_by_columns {

using forward::KernelArgs;
using pair::KeyWalk;
using pair::load_box;
using pair::TileOrigin;

// Of K, which the warpgroups read by turns, from the same units. A warpgroup has barriers of its own, and waits for
// the phases of its own tiles only; a unit is loaded when the warpgroup that has read it last has released it.
template <class Traits>
struct KeyLoader {
  using Element = typename Traits::Element;
  static constexpr int kChunk = Traits::kChunk;

  KernelArgs const& args;
  typename Traits::SharedStorage& smem;
  int last_owner = 0;
  uint32_t phases = 0;  // bit w: of warpgroup w's next tile

  CUTE_DEVICE int first_column() const { return pair::rank_in_pair() * units_of_k(args.params) * kUnitColumns; }

  CUTE_DEVICE void load_q(TileOrigin const& tile) {
    PipelineState<1> const state{0, tile.tile_number & 1};
    smem.q_pipeline.wait_empty(state);  // all consumer warps have finished the last tile's S
    int const chunks = units_of_k(args.params) * (kUnitColumns / kChunk);
    uint64_t* const full = smem.q_pipeline.expect(state, chunks * kBlockM * kChunk * sizeof(Element));
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      load_box(args.q, full, TMA::CacheHintSm90::EVICT_FIRST, smem.q + chunk * kBlockM * kChunk,
               first_column() + chunk * kChunk, tile.first_row, tile.head, tile.rows);
    }
  }

  CUTE_DEVICE void load_k(int owner, int key, TileOrigin const& tile) {
    int const units = units_of_k(args.params);
    int const last_phase = phases >> last_owner & 1, phase = phases >> owner & 1;
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit) {
      smem.k_pipeline[last_owner].wait_empty({unit, last_phase});  // it has read the unit of the tile before
      uint64_t* const full = smem.k_pipeline[owner].expect({unit, phase}, kUnitElements * sizeof(Element));
      CUTE_UNROLL
      for (int column = 0; column < kUnitColumns; column += kChunk) {
        load_box(args.k, full, TMA::CacheHintSm90::EVICT_LAST, smem.k[unit] + column * kBlockN,
                 first_column() + unit * kUnitColumns + column, key, tile.head_kv, tile.keys);
      }
    }
    last_owner = owner;
    phases ^= 1u << owner;
  }

  CUTE_DEVICE void load(TileOrigin const& tile, KeyWalk const& walk) {
    int const steps = walk.steps, announced_at = max(0, steps - forward::kTilesAhead);
    auto const announce = [&] { smem.next_tile.publish({0, tile.tile_number & 1}); };
    if (steps == 0) {
      announce();
      load_q(tile);
    }
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      if (i == announced_at) announce();
      load_k(i & 1, walk.tile(i) * kBlockN, tile);
      if (i == 0) load_q(tile);
    }
  }
};

template <class Traits, int kHalf>
struct ValueLoader {
  using Element = typename Traits::Element;
  static constexpr int kChunk = Traits::kChunk;

  KernelArgs const& args;
  typename Traits::SharedStorage& smem;
  PipelineState<kUnitsOfVRing> state{};

  CUTE_DEVICE void load_v(int key, TileOrigin const& tile) {
    auto& pipeline = smem.v_pipeline[kHalf];
    int const parts = parts_of_v(args.params);
    int const first_part = (kWarpgroups * pair::rank_in_pair() + kHalf) * parts;
#pragma unroll 1
    for (int unit = 0; unit < parts * (kBlockN / kUnitKeys); ++unit) {
      pipeline.wait_empty(state);  // the warpgroup has read the unit that was there
      uint64_t* const full = pipeline.expect(state, kUnitElements * sizeof(Element));
      CUTE_UNROLL
      for (int column = 0; column < kUnitColumnsOfV; column += kChunk) {
        int const first_column = (first_part + unit % parts) * kUnitColumnsOfV;
        load_box(args.v, full, TMA::CacheHintSm90::EVICT_LAST, smem.v[kHalf][state.stage] + column * kUnitKeys,
                 first_column + column, key + unit / parts * kUnitKeys, tile.head_kv, tile.keys);
      }
      state.advance();
    }
  }

  CUTE_DEVICE void load(TileOrigin const& tile, KeyWalk const& walk) {
#pragma unroll 1
    for (int i = 0; i < walk.steps; ++i) load_v(walk.tile(i) * kBlockN, tile);
  }
};

}  // namespace flash_cute::sm90::forward::pair_by_columns
