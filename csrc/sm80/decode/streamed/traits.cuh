// Types of the kernels of attention over a KV cache with large head dims, and what a CTA has in shared memory beside
// the ring of slabs.
#pragma once

#include "core/split_keys/work.cuh"
#include "tile.h"

namespace flash_cute::sm80::decode::streamed {

using namespace cute;
using flash_cute::split_keys::Unit;
using flash_cute::split_keys::Walk;

struct Cut {
  static constexpr int kTileKeys = streamed::kTileKeys;
  static constexpr bool kRoundsRanges = false;
  static constexpr bool kMayCutAtRanges = false;
  CUTE_DEVICE static int tile_rows(DecodeParams const& params, int rows) {
    return rows_of_tile(rows, params.many_rows);
  }
  CUTE_DEVICE static int piece_tiles(DecodeParams const& params, int rows, int tiles) {
    return streamed::piece_tiles(rows, tiles, params.most_pieces);
  }
};

template <class Element_, int kHeadDim_, int kHeadDimV_>
struct Traits {
  using Element = Element_;
  using Cut = streamed::Cut;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kManyRows = most_rows(kHeadDimV);

  static constexpr int kKeySlabs = key_slabs(kHeadDim);
  static constexpr int kValueColumns = value_columns(kHeadDimV);
  static constexpr int kValueKeys = value_keys(kHeadDimV);
  static constexpr int kValueParts = kHeadDimV / kValueColumns;    // slabs of V for all columns of the same keys
  static constexpr int kWarpColumns = kValueColumns / kWarps;      // of a slab
  static_assert(kHeadDimV % kValueColumns == 0 && kValueKeys % 16 == 0 && (kWarpColumns == 32 || kWarpColumns == 64));
};

// Where a key is in K and in V, in elements from their first one; below 0: there is no such key.
struct Place {
  int64_t of[2];
};

struct Storage {
  // The scores of a key tile, of each group of warps (see scores.cuh), then P; at the end of a piece RowScratch.
  alignas(16) float scores[kWarps * kFewRows * kTileKeys];
  Place places[kPlacedTiles][kTileKeys];  // of the tiles whose slabs are being loaded
  float factors[flash_cute::kManyRows];  // by which the accumulators of a row are multiplied before a key tile
  float max[flash_cute::kManyRows];      // of the raw scores of a row, exact, so that the largest numerator is 1
  float sum[flash_cute::kManyRows];      // of its numerators
  alignas(16) char walk[sizeof(Walk<Cut>)];
  bool has_unit;
};
static_assert(sizeof(Storage) <= kFixedBytes);

}  // namespace flash_cute::sm80::decode::streamed
