// What follows from head dims and chip: plain constants.
#pragma once

#include <algorithm>

#include "contract/decode.h"
#include "sm80/common/chip.h"

namespace flash_cute::sm80::decode::streamed {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileKeys = 64;

// Keys and values pass through shared memory in slabs of one size. One of K has a tile's keys and 128 columns. One of V
// has up to 512 columns, and as many keys as it has room for.
constexpr int kSlabElements = 8192;
constexpr int kSlabBytes = 2 * kSlabElements;
constexpr int kKeyColumns = kSlabElements / kTileKeys;
constexpr int kMinStages = 3;    // slabs: one is read, one has been read, one is on its way
constexpr int kMaxStages = 12;   // what the wait for a slab knows
constexpr int kStagesToSpareBarriers = 6;  // from here on a barrier is for two slabs
constexpr int kPlacedTiles = 2;  // those of so many tiles may be on their way

constexpr int key_slabs(int head_dim) { return (head_dim + kKeyColumns - 1) / kKeyColumns; }
constexpr int value_columns(int head_dim_v) { return std::min(head_dim_v, 512); }
constexpr int value_keys(int head_dim_v) { return kSlabElements / value_columns(head_dim_v); }

// Of a key tile: of K and of V. `kernel_head_dim_v`: of the kernel, else of the tensors.
constexpr int value_slabs(int head_dim_v, int kernel_head_dim_v) {
  int const columns = value_columns(kernel_head_dim_v), parts = (head_dim_v + columns - 1) / columns;
  return parts * (kTileKeys / value_keys(kernel_head_dim_v));
}
constexpr int tile_slabs(int head_dim, int head_dim_v, int kernel_head_dim_v) {
  return key_slabs(head_dim) + value_slabs(head_dim_v, kernel_head_dim_v);
}

// Rows of a tile of a sequence of more than kFewRows. At 512 columns the accumulators of 64 take half of the registers.
constexpr int most_rows(int head_dim_v) { return head_dim_v <= 512 ? kManyRows : kFewRows; }

// Their parts are large, so that they have fewer pieces.
constexpr int kPieceKeysOfMany = 256;
constexpr int kPiecesOfMany = 16;

// Of the key tiles of a sequence of so many packed rows.
constexpr int piece_tiles(int rows, int tiles, Divisor const& most) {
  if (rows <= kFewRows) return flash_cute::piece_tiles(tiles, kTileKeys, most);
  int const least = kPieceKeysOfMany / kTileKeys, given = most;
  int const pieces = given < kPiecesOfMany ? given : kPiecesOfMany;
  int const even = (tiles + pieces - 1) / pieces;
  return even > least ? even : least;
}

// Where a tile has more than kFewRows rows, its queries lie in shared memory, in blocks of 64 columns.
constexpr int query_bytes(int rows, int head_dim) {
  return rows == kFewRows ? 0 : 2 * rows * ((head_dim + 63) / 64 * 64);
}

// Scores, places of keys and the like, beside slabs and queries.
constexpr int kFixedBytes = 35 * 1024;

// Slabs in shared memory. `bytes`: for them and the queries; `tile_slabs`: of a key tile.
constexpr int stages(int bytes, int rows, int head_dim, int tile_slabs) {
  int const room = (bytes - query_bytes(rows, head_dim)) / kSlabBytes;
  int const most = kPlacedTiles * tile_slabs < kMaxStages ? kPlacedTiles * tile_slabs : kMaxStages;
  return room < most ? room : most;
}

constexpr int slab_bytes(int chip) { return kMaxSmemBytes[chip] - kFixedBytes; }

// Rows of a tile of a sequence of more than kFewRows: kFewRows on chips whose shared memory has no room for more.
constexpr int many_rows(int chip, int head_dim, int head_dim_v) {
  int const rows = most_rows(head_dim_v);
  return stages(slab_bytes(chip), rows, head_dim, kMaxStages) >= kMinStages ? rows : kFewRows;
}

// Pieces of a sequence of at most kFewRows rows.
constexpr int most_pieces(int heads_kv, int head_dim_v) {
  int const most = head_dim_v <= 512 ? 128 : 64;
  return std::clamp(most / std::max(1, heads_kv), 8, most);
}

}  // namespace flash_cute::sm80::decode::streamed
