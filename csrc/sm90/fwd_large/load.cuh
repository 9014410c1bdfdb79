// The producers: three threads load by TMA what the consumers read, each through a ring of its own: K, and Q; one half
// of the columns of V; the other.
#pragma once

#include "../fwd/args.cuh"
#include "../sequence_map.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::fwd_large {

using fwd::KernelArgs;

// What a row tile's loads have in common.
struct TileOrigin {
  int draws;
  int head;
  int head_kv;
  int first_row;
  SequenceOrigin rows;
  SequenceOrigin keys;
};

CUTE_DEVICE void load_box(CUtensorMap const& map, uint64_t* full, TMA::CacheHintSm90 hint, void* box, int column,
                          int row, int head, SequenceOrigin const& origin) {
  SM90_TMA_LOAD_5D::copy(&map, full, static_cast<uint64_t>(hint), box, column, origin.row + row, head, origin.last,
                         origin.back);
}

// Without a mask the CTAs read the same keys at the same time, so that each load would wait for memory as long as the
// first. Each row tile of a head prefetches some of the boxes to L2, this many steps before it loads them.
constexpr int kStepsAhead = 2;

CUTE_DEVICE void prefetch_box(CUtensorMap const& map, int column, int row, int head, SequenceOrigin const& origin) {
  SM90_TMA_LOAD_5D::PREFETCH::copy(&map, column, origin.row + row, head, origin.last, origin.back);
}

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

  CUTE_DEVICE int first_column() const { return cta_rank<Traits>() * units_of_k<Traits>(args.params) * kUnitColumns; }

  CUTE_DEVICE void load_q(TileOrigin const& tile) {
    PipelineState<1> const state{0, tile.draws & 1};
    smem.q_pipeline.wait_empty(state);  // all consumer warps have finished the last tile's S
    int const chunks = units_of_k<Traits>(args.params) * (kUnitColumns / kChunk);
    uint64_t* const full = smem.q_pipeline.expect(state, chunks * kBlockM * kChunk * sizeof(Element));
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      load_box(args.q, full, TMA::CacheHintSm90::EVICT_FIRST, smem.q + chunk * kBlockM * kChunk,
               first_column() + chunk * kChunk, tile.first_row, tile.head, tile.rows);
    }
  }

  CUTE_DEVICE void load_k(int owner, int key, TileOrigin const& tile) {
    int const units = units_of_k<Traits>(args.params);
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

  CUTE_DEVICE void load(TileOrigin const& tile, int steps, int last_key_tile) {
    int const announced_at = max(0, steps - fwd::kTilesAhead);
    auto const announce = [&] { smem.next_tile.publish({0, tile.draws & 1}); };
    if (steps == 0) {
      announce();
      load_q(tile);
    }
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      if (i == announced_at) announce();
      if (i + kStepsAhead < steps) {
        int const unit = tile.first_row / kBlockM % units_of_k<Traits>(args.params);
        prefetch_box(args.k, first_column() + unit * kUnitColumns, (last_key_tile - i - kStepsAhead) * kBlockN,
                     tile.head_kv, tile.keys);
      }
      load_k(i & 1, (last_key_tile - i) * kBlockN, tile);
      if (i == 0) load_q(tile);
    }
  }
};

template <class Traits, int kHalf>
struct ValueLoader {
  using Element = typename Traits::Element;
  static constexpr int kChunk = Traits::kChunk;
  static constexpr int kBoxes = Traits::kHalf / kChunk;  // of a unit

  KernelArgs const& args;
  typename Traits::SharedStorage& smem;
  PipelineState<Traits::kUnitsOfVRing> state{};

  CUTE_DEVICE void load_v(int key, TileOrigin const& tile) {
    auto& pipeline = smem.v_pipeline[kHalf];
    int const half_begin = cta_rank<Traits>() * kColumns + kHalf * Traits::kHalf;
#pragma unroll 1
    for (int unit = 0; unit < Traits::kUnitsOfV; ++unit) {
      pipeline.wait_empty(state);  // the warpgroup has read the unit that was there
      uint64_t* const full = pipeline.expect(state, kUnitElements * sizeof(Element));
      CUTE_UNROLL
      for (int column = 0; column < kUnitColumnsOfV; column += kChunk) {
        int const first_column = half_begin + unit % Traits::kPartsOfV * kUnitColumnsOfV;
        load_box(args.v, full, TMA::CacheHintSm90::EVICT_LAST, smem.v[kHalf][state.stage] + column * kUnitKeys,
                 first_column + column, key + unit / Traits::kPartsOfV * kUnitKeys, tile.head_kv, tile.keys);
      }
      state.advance();
    }
  }

  CUTE_DEVICE void load(TileOrigin const& tile, int steps, int last_key_tile) {
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      if (i + kStepsAhead < steps) {
        int const number = tile.first_row / kBlockM;
        int const first_column = cta_rank<Traits>() * kColumns + kHalf * Traits::kHalf;
        prefetch_box(args.v, first_column + number % kBoxes * kChunk,
                     (last_key_tile - i - kStepsAhead) * kBlockN + number / kBoxes % (kBlockN / kUnitKeys) * kUnitKeys,
                     tile.head_kv, tile.keys);
      }
      load_v((last_key_tile - i) * kBlockN, tile);
    }
  }
};

// schedule_sequences publishes the tiles.
template <class Traits, class Loader>
CUTE_DEVICE void produce(KernelArgs const& args, typename Traits::SharedStorage& smem, Loader loader) {
  bool const packed = args.params.sequences.cu_q != nullptr;
#pragma unroll 1
  for (int draws = 0;; ++draws) {
    smem.tile_pipeline.wait_full(at_step(draws));  // the scheduler has written the tile
    fwd::SequenceTile const& tile = smem.tile[draws & 1];
    if (tile.m_block < 0) break;
    Sequence const& sequence = tile.sequence;
    auto const origin = [&](int first, int length) {
      return packed ? SequenceOrigin::packed(first, length) : SequenceOrigin::dense(tile.batch);
    };
    TileOrigin const from{.draws = draws,
                          .head = tile.head,
                          .head_kv = tile.head_kv,
                          .first_row = tile.m_block * kBlockM,
                          .rows = origin(sequence.first_row, sequence.len_q),
                          .keys = origin(sequence.first_key, sequence.len_k)};
    loader.load(from, tile.keys.end - tile.keys.begin, tile.keys.end - 1);
    smem.tile_pipeline.arrive_empty(at_step(draws));  // the scheduler may overwrite the tile
  }
}

}  // namespace flash_cute::sm90::fwd_large
