// A row tile over a chunk of keys, and what the forward's main loop asks of it.
#pragma once

#include "sm90/decode/long_rows/traits.cuh"
#include "sm90/forward/common/place.cuh"
#include "sm90/forward/common/warpgroup_keys.cuh"
#include "sm90/forward/rows/traits.cuh"
#include "tile.h"

namespace flash_cute::sm90::decode::key_chunks {

using forward::SequenceTile;
using forward::TileCoord;

// What becomes of a chunk's result.
enum Fold : int {
  kContinues = 1,  // there are chunks before it, whose fold this CTA has
  kGoesOn = 2,     // there are chunks behind it: their fold is kept
  kIsPart = 4,     // it goes to the workspace, for the second kernel; else, behind the last chunk, it is stored
  kFromOther = 8,  // with kContinues: the CTA before this one has the fold
  kToOther = 16,   // with kGoesOn: the CTA behind this one goes on
};
// Whether the CTA has the chunk before, or the one behind, of the same row tile.
CUTE_DEVICE constexpr bool is_first(int fold) { return (fold & (kContinues | kFromOther)) != kContinues; }
CUTE_DEVICE constexpr bool is_last(int fold) { return (fold & (kGoesOn | kToOther)) != kGoesOn; }

// `head` is the first of the tile's query heads, `m_block` counts row tiles of a CTA.
struct Tile : SequenceTile {
  PackedRows rows;
  int inverse;  // PackedRows::inverse()
  int fold;     // of Fold
  int page;     // where there is no table of pages
  int q_stage;  // the buffer of Q, and its phase
  int q_phase;
  int64_t part;  // in the workspace

  // Of row r of a warpgroup's 64.
  CUTE_DEVICE int position(int r) const { return r * inverse >> 16; }
};

CUTE_DEVICE Tile const& lengths_of(FwdParams const&, Tile const& tile) { return tile; }

// Sets the scores outside the band to -inf; `offset`: the position of the warpgroup's first row minus the key tile's
// first column.
template <class Scores, class Coords, class Coords0>
CUTE_DEVICE void apply_mask(Scores& scores,             // (rows, columns)
                            Coords const& tScS,         // (rows, columns) -> (row, column)
                            Coords0 const& /*tScS_0*/,  // the same for thread 0, static
                            Tile const& tile, int offset, int columns) {
  constexpr int kPeriod = element_period<Coords0>();
  Band const band = tile.sequence.band;
  int const thread_column = get<1>(tScS(_0{}, _0{}));
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    int const row = offset + tile.position(get<0>(tScS(i, _0{})));
    keep_range<kPeriod>(scores(i, _), row + band.lower - thread_column,
                        min(columns, row + band.upper + 1) - thread_column);
  }
}

// What a CTA has of the row tiles that are cut, see pieces.cuh: tiles [first, last], but of the first one the chunks
// from `begin` on, and of the last one those before `end`.
struct Pieces {
  int cut;  // tiles of the numbers below this are cut
  int first;
  int last;
  int begin;
  int end;
  int slot;  // the first one, if it was begun by another CTA, comes behind so many whole tiles
};

// A warpgroup's fold: a thread's words are the accumulator's, 8 columns of its two rows in each. While there is no
// fold, O on its way to global memory, and the second buffer of Q.
template <class Element, int kHeadDim>
union FoldBuffer {
  float4 words[kHeadDim / 8][128];
  struct {
    uint4 out[4][16 * kHeadDim / 8];
    Element q[kRows * kHeadDim];
  } results;
};

template <class Element, int kWarpgroups, int kHeadDim>
struct FoldStorage {
  FoldBuffer<Element, kHeadDim> folds[kWarpgroups];
  float2 sums[kWarpgroups][kRows];  // sum and error of each row

  CUTE_DEVICE uint4* out(int warpgroup, int warp) { return folds[warpgroup].results.out[warp]; }
  CUTE_DEVICE Element* q(int warpgroup) { return folds[warpgroup].results.q; }
};
template <class Element, int kWarpgroups, int kHeadDim>
struct OutAndQ {
  uint4 out_[kWarpgroups][4][16 * kHeadDim / 8];
  Element q_[kWarpgroups][kRows * kHeadDim];

  CUTE_DEVICE uint4* out(int warpgroup, int warp) { return out_[warpgroup][warp]; }
  CUTE_DEVICE Element* q(int warpgroup) { return q_[warpgroup]; }
};
template <int kWarpgroups, int kHeadDim>
struct OutAlone {
  uint4 out_[kWarpgroups][4][16 * kHeadDim / 8];

  CUTE_DEVICE uint4* out(int warpgroup, int warp) { return out_[warpgroup][warp]; }
};
struct NoResults {};

template <class Element, int kHeadDim, Chunks kChunks_>
struct Traits : forward::rows::Traits<Element, kHeadDim, tile_config(kHeadDim, kChunks_), Variant::kPacked, kHeadDim> {
  using Base = forward::rows::Traits<Element, kHeadDim, tile_config(kHeadDim, kChunks_), Variant::kPacked, kHeadDim>;
  static constexpr Chunks kChunks = kChunks_;
  static constexpr bool kPacksHeads = true;
  static constexpr int kChunkTiles = chunk_tiles(kHeadDim);
  static constexpr SmemBytes kSmem{kHeadDim, kChunks};
  static constexpr bool kOutThroughSmem = kSmem.has_o;
  // Whether the next tile is read under a row tile's last product: above there are too few registers.
  static constexpr bool kReadsNext = kHeadDim <= 128;
  using Tile = key_chunks::Tile;

  struct alignas(1024) SharedStorage {
    Element k[Base::kStages][Base::kKElements];
    Element v[Base::kStages][Base::kVElements];
    Element q[Base::kWarpgroups][Base::kQElements];
    std::conditional_t<
        kSmem.has_fold, FoldStorage<Element, Base::kWarpgroups, kHeadDim>,
        std::conditional_t<kSmem.q_stages == 2, OutAndQ<Element, Base::kWarpgroups, kHeadDim>,
                           std::conditional_t<kSmem.has_o, OutAlone<Base::kWarpgroups, kHeadDim>, NoResults>>>
        results;
    Pipeline<Base::kStages> k_pipeline;
    Pipeline<Base::kStages> v_pipeline;
    Pipeline<kSmem.q_stages> q_pipeline[Base::kWarpgroups];
    Tile tile[2];
    Pipeline<2> tile_pipeline;
    Floors floors[32];
    forward::TileNumbers own_tiles[32];
    Pipeline<1> next_tile;  // of V at an edge, see long_rows::edge_pipeline
    Pieces pieces;

    CUTE_DEVICE Element* queries(int stage, int warpgroup) {
      if constexpr (kSmem.q_stages == 2) {
        if (stage == 1) return results.q(warpgroup);
      }
      return q[warpgroup];
    }
  };
  static_assert(sizeof(SharedStorage) <= kSmem.total);
};

CUTE_DEVICE bool has_queries(Tile const volatile& tile) { return !is_first(tile.fold); }
template <class Traits>
CUTE_DEVICE auto query_state(Tile const volatile& tile, int = 0) {
  return PipelineState<Traits::kSmem.q_stages>{tile.q_stage, tile.q_phase};
}

// The position of a CTA's first row.
template <class Traits>
CUTE_DEVICE int first_position(Tile const volatile& tile) {
  return tile.m_block * (Traits::kWarpgroups * tile.rows.positions);
}
CUTE_DEVICE int contiguous_page(Tile const volatile& tile) { return tile.page; }
CUTE_DEVICE int row_of_key_0(Tile const volatile& tile) { return tile.sequence.first_key; }

}  // namespace flash_cute::sm90::decode::key_chunks

namespace flash_cute::sm90::forward {

// The key tiles of the CTA's chunk that a warpgroup with rows of several heads computes.
template <class Traits>
  requires(Traits::kPacksHeads)
struct WarpgroupKeys<Traits> {
  bool exists;
  int first_row;  // its position
  int begin;
  int whole_begin;
  int whole_end;
  int end;
  int before;
  int after;
  int count;

  CUTE_DEVICE void read(FwdParams const& params, typename Traits::SharedStorage& smem, int tile_number, int warpgroup) {
    smem.tile_pipeline.wait_full(at_step(tile_number));  // the scheduler has written the tile
    auto const& tile = smem.tile[tile_number & 1];
    int const cta_block = uniform(tile.m_block);
    exists = cta_block >= 0;
    Sequence const sequence = uniform_lengths_of(params, tile);
    int const positions = uniform(tile.rows.positions), m_block = cta_block * Traits::kWarpgroups + warpgroup;
    int const cta_begin = uniform(tile.keys.begin), cta_end = uniform(tile.keys.end);
    TileRange const range = key_range<Traits::kBlockN>(sequence, m_block, positions);
    first_row = m_block * positions;
    bool const has_rows = first_row < sequence.len_q;
    begin = has_rows ? min(cta_end, max(cta_begin, range.begin)) : cta_end;
    end = has_rows ? max(begin, min(cta_end, range.end)) : begin;
    whole_end = max(begin, min(end, range.whole_end));
    whole_begin = min(whole_end, max(begin, range.whole_begin));
    before = begin - cta_begin;
    after = cta_end - end;
    count = uniform(tile.keys.count);
  }
};

}  // namespace flash_cute::sm90::forward
