// A mask that a band cannot say: of each key column the rows that see it, as the caller gives them and as kernels read
// them. Plain data: no torch, no CuTe.
#pragma once

#include <cstdint>

namespace flash_cute {

constexpr int kMaxIntervals = 2;  // of a column

// A tensor of int32: (batch | 1, heads_kv | 1, len_k). Strides in elements; 0 broadcasts.
struct ColumnTensor {
  int const* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t column_stride;
};

// A tensor of bool: (batch | 1, heads_kv | 1, rows, columns). Strides in elements; 0 broadcasts, over rows and columns
// too.
struct MatrixTensor {
  bool const* data;  // null: all is true
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
  int64_t column_stride;
};

constexpr int kBlockEdge = 64;  // rows and columns of a block of GivenMask::blocks

// The caller's. Row i sees column j if the band lets it, and first_row[n][j] <= i < row_limit[n][j] for an n, and the
// matrix is true at (i, j), and the blocks at (i / 64, j / 64). The row of a packed call is that of the packed tensor.
// Any values are allowed; an interval may be empty, and two may overlap.
struct GivenMask {
  ColumnTensor first_row[kMaxIntervals];  // [1].data null: one interval
  ColumnTensor row_limit[kMaxIntervals];
  MatrixTensor matrix;
  MatrixTensor blocks;

  constexpr bool has_matrix() const { return matrix.data != nullptr || blocks.data != nullptr; }
};

// Rows [first, limit). An empty one is {0, 0}.
struct RowInterval {
  int first;
  int limit;
};

// What intervals cannot say: which of 64 rows, from a multiple of 64 on, see a column. Bit r is row r of them; those
// from len_q on are 0. As many bytes as a RowInterval.
using RowBits = uint64_t;
constexpr int kBitRows = 64;

// Which of 64 rows see a key tile. The kernels of masks/ alone read it.
struct alignas(16) TileRows {
  RowBits some;  // those that see some of its columns
  RowBits all;   // those that see all of them
};

// One bit for each pair of a row unit and a key tile, in lists of words: bit n % 32 of word n / 32 is number n of the
// list. Lists are (batches, heads, number of lists, words); bits past the last number are 0.
struct TileBits {
  uint32_t const* visited;  // some row of the unit sees some column of the tile
  uint32_t const* whole;    // every row of the unit below len_q sees every column of the tile below len_k, and the tile
                            // has no columns from len_k on: it needs no mask
  int words;                // of a list
  int lists;
};

// What kernels read, made on the device by masks/ before them: of each column either intervals or bits. The band, and
// the sequences of a packed call, are in them: kernels that read a mask read no band, and take a packed call for one
// sequence of all rows and keys. All lists and intervals have the batches and heads that the caller's tensors have
// together; an index is taken by strides, which are 0 where there is one.
struct TileMask {
  // (intervals per column, batches, heads, columns): columns are a whole number of key tiles, those from len_k on have
  // empty intervals. The two of a column are in order and do not touch; where there is only one, it is the first. Each
  // row of columns begins at a multiple of 128 bytes.
  RowInterval const* intervals;
  int intervals_per_column;       // 1 or 2; 0: there are bits, or no mask
  int64_t interval_stride;        // from a column's first interval to its second, in RowInterval
  int64_t batch_stride;           // of intervals
  int64_t head_stride;            // of intervals, by KV head
  // (batches, heads, blocks of 64 rows, columns), the columns as of intervals. Null: there are intervals.
  RowBits const* bits;
  int64_t bits_block_stride;  // from a block of rows to the next one, in RowBits: the columns
  int64_t bits_batch_stride;
  int64_t bits_head_stride;
  TileBits of_rows;               // a list for each row unit: bits are key tiles
  TileBits of_keys;               // a list for each key tile: bits are row units; null where no kernel asks for them
  int64_t row_list_batch_stride;  // of of_rows, in words
  int64_t row_list_head_stride;   // by KV head
  int64_t key_list_batch_stride;  // of of_keys
  int64_t key_list_head_stride;
  int const* row_order;           // (batches, heads, row tiles): those with the most key tiles first; null: unknown
  int64_t row_order_batch_stride;
  int64_t row_order_head_stride;
};

// What a kernel asks of a mask's lists: the family's plan fills in the first three, the planner the rest.
struct TileMaskPlan {
  int unit_rows = 0;        // rows of a unit: those of the tile, or of a warpgroup's part of it; 0: no mask
  int block_n = 0;          // keys of a tile
  bool lists_keys = false;  // of_keys too
  int batches = 0;          // of the mask: the call's or 1
  int heads = 0;            // heads_kv or 1
  int row_units = 0;
  int key_tiles = 0;
  // Where the parts begin in the workspace, in bytes.
  int64_t intervals = -1;  // or
  int64_t bits = -1;       // where the mask has a matrix, and
  int64_t tile_rows = -1;  // TileRows of each block of 64 rows and key tile
  int64_t rows_visited = -1;
  int64_t rows_whole = -1;
  int64_t keys_visited = -1;
  int64_t keys_whole = -1;
  // Where row tiles are to be sorted: of a forward whose tiles are drawn. The family fills in the first.
  int tile_units = 0;  // row units of a row tile; 0: they are not sorted
  int64_t row_order = -1;

  static constexpr int kMostSorted = 2048;  // row tiles of a head
  constexpr int row_tiles() const { return (row_units + tile_units - 1) / tile_units; }

  // Words of a row unit's list, of a key tile's, and columns of a row of intervals.
  constexpr int key_words() const { return words_of(key_tiles); }
  constexpr int row_words() const { return words_of(row_units); }
  constexpr int64_t columns() const { return (int64_t{key_tiles} * block_n + 15) / 16 * 16; }

 private:
  static constexpr int words_of(int bits) { return bits <= 32 ? 1 : (bits + 31) / 32; }
};

}  // namespace flash_cute
