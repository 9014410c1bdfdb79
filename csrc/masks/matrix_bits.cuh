// The bits of a mask that has a matrix or blocks: reads these and the intervals, and writes of each column the rows
// that see it, and of each key tile the rows that see some and all of its columns. matrix_lists.cuh makes the lists of
// the latter. The memory that the matrix is read from, a byte per row and column, bounds the speed.
//
// A CTA has up to 256 columns, whole key tiles, and four blocks of 64 rows, one for each warp. The warps share what
// intervals, band and sequences let see of the columns. Where these or the blocks hide all that a load would bring, it
// is left out. A pair of lanes has 16 columns, and each of the two reads 32 of the rows, 16 bytes at once. Where the
// matrix does not lie so, a lane reads the 64 bytes of a column, and a warp 32 neighbouring columns.
#pragma once

#include "dependents.cuh"
#include "intervals.cuh"
#include "row_bits.cuh"

namespace flash_cute::masks {

constexpr int kMatrixWarps = 4;  // blocks of rows of a CTA
constexpr int kMatrixThreads = 32 * kMatrixWarps;
constexpr int kMatrixColumns = 256;  // of a CTA, at most
constexpr int kPairColumns = 16;     // of a pair of lanes

// What a CTA has: key tiles and blocks of rows of a head.
struct MatrixShare {
  int batch;
  int head;
  int first_tile;
  int tiles;
  int first_block;
};

// A CTA's key tiles, at most.
CUTE_HOST_DEVICE int tiles_per_cta(TileMaskPlan const& plan) { return kMatrixColumns / plan.block_n; }
CUTE_HOST_DEVICE int ranges_of_tiles(TileMaskPlan const& plan) {
  return (plan.key_tiles + tiles_per_cta(plan) - 1) / tiles_per_cta(plan);
}
CUTE_HOST_DEVICE int ranges_of_blocks(int len_q) { return (row_blocks(len_q) + kMatrixWarps - 1) / kMatrixWarps; }

inline int64_t matrix_ctas(Params const& params) {
  TileMaskPlan const& plan = params.plan;
  return int64_t{plan.batches} * plan.heads * ranges_of_tiles(plan) * ranges_of_blocks(params.len_q);
}

CUTE_HOST_DEVICE MatrixShare matrix_share_of(Params const& params, int index) {
  TileMaskPlan const& plan = params.plan;
  int const ranges = ranges_of_tiles(plan), row_ranges = ranges_of_blocks(params.len_q);
  int const first_tile = index % ranges * tiles_per_cta(plan), pair = index / ranges / row_ranges;
  return {.batch = pair / plan.heads,
          .head = pair % plan.heads,
          .first_tile = first_tile,
          .tiles = cute::min(tiles_per_cta(plan), plan.key_tiles - first_tile),
          .first_block = index / ranges % row_ranges * kMatrixWarps};
}

CUTE_HOST_DEVICE uint8_t const* element_of(MatrixTensor const& tensor, MatrixShare const& share, int row, int column) {
  return reinterpret_cast<uint8_t const*>(tensor.data) + share.batch * tensor.batch_stride +
         share.head * tensor.head_stride + row * tensor.row_stride + column * tensor.column_stride;
}

struct alignas(16) Bytes16 {
  uint32_t words[4];
};

struct alignas(16) TwoColumns {
  RowBits of[2];
};

// The columns that a lane of a pair keeps, of 64 rows: two of each four of the pair's, the first lane the first two. So
// what a pair stores at once is a sector of 32 bytes.
struct LaneBits {
  RowBits of[4][2];

  CUTE_HOST_DEVICE static int column(int lane, int word, int i) {
    return lane / 2 * kPairColumns + 4 * word + lane % 2 * 2 + i;
  }

  CUTE_HOST_DEVICE void store(RowBits* columns, int lane) const {
    CUTE_UNROLL
    for (int word = 0; word < 4; ++word) {
      *reinterpret_cast<TwoColumns*>(columns + column(lane, word, 0)) = {of[word][0], of[word][1]};
    }
  }

  CUTE_HOST_DEVICE void load(RowBits const* columns, int lane) {
    CUTE_UNROLL
    for (int word = 0; word < 4; ++word) {
      TwoColumns const two = *reinterpret_cast<TwoColumns const*>(columns + column(lane, word, 0));
      of[word][0] = two.of[0];
      of[word][1] = two.of[1];
    }
  }

  CUTE_HOST_DEVICE TileRows seen() const {
    TileRows rows{.some = 0, .all = ~RowBits{0}};
    CUTE_UNROLL
    for (int word = 0; word < 4; ++word) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        rows.some |= of[word][i];
        rows.all &= of[word][i];
      }
    }
    return rows;
  }
};

// ANDs a pair's 16 columns of the matrix to the lane's bits. `from`: the first of the lane's rows, of which those in
// `needed` are read. All lanes of a warp call it.
CUTE_DEVICE void and_wide(LaneBits& bits, uint8_t const* from, int64_t row_stride, uint32_t needed, int half) {
  uint32_t of_rows[4][4];  // (four columns, 8 rows): a byte has a column's bits
  CUTE_UNROLL
  for (int part = 0; part < 4; ++part) {
    Bytes16 rows[8];
    CUTE_UNROLL
    for (int r = 0; r < 8; ++r) {
      rows[r] = Bytes16{};
      if (needed >> (8 * part + r) & 1) rows[r] = *reinterpret_cast<Bytes16 const*>(from);
      from += row_stride;
    }
    CUTE_UNROLL
    for (int word = 0; word < 4; ++word) {
      uint32_t columns = 0;
      CUTE_UNROLL
      for (int r = 0; r < 8; ++r) columns = columns >> 1 | true_bytes(rows[r].words[word]);
      of_rows[word][part] = columns;
    }
  }
  CUTE_UNROLL
  for (int word = 0; word < 4; ++word) {
    uint32_t columns[4];  // 32 rows each
    transpose_bytes(of_rows[word], columns);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t const own = half == 0 ? columns[i] : columns[2 + i], given = half == 0 ? columns[2 + i] : columns[i];
      uint32_t const taken = __shfl_xor_sync(0xffffffff, given, 1);
      bits.of[word][i] &= half == 0 ? RowBits{taken} << 32 | own : RowBits{own} << 32 | taken;
    }
  }
}

// The 64 rows of a column of the matrix, of which those in `needed` are read.
CUTE_DEVICE RowBits read_column(uint8_t const* from, int64_t row_stride, RowBits needed) {
  uint32_t halves[2] = {0, 0};
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t const rows = static_cast<uint32_t>(needed >> 32 * half);
    CUTE_UNROLL
    for (int r = 0; r < 32; ++r) {
      uint32_t byte = 0;
      if (rows >> r & 1) byte = *from;
      from += row_stride;
      halves[half] |= byte != 0 ? 1u << r : 0;
    }
  }
  return RowBits{halves[1]} << 32 | halves[0];
}

// Whether every row of a share's columns below len_k is whole vectors of 16 bytes.
CUTE_HOST_DEVICE bool is_wide(Params const& params, int first_column, int columns) {
  MatrixTensor const& matrix = params.given.matrix;
  auto const strides = reinterpret_cast<uintptr_t>(matrix.data) | static_cast<uintptr_t>(matrix.batch_stride) |
                       static_cast<uintptr_t>(matrix.head_stride) | static_cast<uintptr_t>(matrix.row_stride);
  bool const ends_whole = params.len_k % kPairColumns == 0 || first_column + int64_t{columns} <= params.len_k;
  return matrix.column_stride == 1 && strides % sizeof(Bytes16) == 0 && ends_whole;
}

// kArch: the folder of csrc/ for whose chips the file is compiled.
template <int kArch>
__global__ void __launch_bounds__(kMatrixThreads) matrix_bits_kernel(__grid_constant__ Params const params) {
  launch_dependents<kArch>();  // the kernel after waits for the end of this one
  TileMaskPlan const& plan = params.plan;
  MatrixShare const share = matrix_share_of(params, blockIdx.x);
  int const first_column = share.first_tile * plan.block_n, columns = share.tiles * plan.block_n;
  __shared__ ColumnRows column_intervals[kMatrixColumns];
  for (int i = threadIdx.x; i < columns; i += kMatrixThreads) {
    column_intervals[i] = column_rows(params, share.batch, share.head, first_column + i);
  }
  __syncthreads();  // all intervals are there

  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = lane % 2;
  int const block = share.first_block + warp, blocks = row_blocks(params.len_q);
  int const first_row = kBitRows * block;
  int const pair_column = lane / 2 * kPairColumns, column = first_column + pair_column;
  bool const exists = block < blocks && pair_column < columns;
  bool kept = exists && column < params.len_k;  // else nothing is seen
  if (kept && params.given.blocks.data != nullptr) {
    kept = *element_of(params.given.blocks, share, block, column / kBlockEdge) != 0;
  }
  LaneBits bits;
  CUTE_UNROLL
  for (int word = 0; word < 4; ++word) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      bits.of[word][i] = 0;
      if (!kept) continue;
      ColumnRows const& rows = column_intervals[LaneBits::column(lane, word, i)];
      bits.of[word][i] = row_bits(rows.of[0], first_row) | row_bits(rows.of[1], first_row);
    }
  }

  MatrixTensor const& matrix = params.given.matrix;
  alignas(16) __shared__ RowBits staged[kMatrixWarps][kMatrixColumns];
  if (matrix.data != nullptr && is_wide(params, first_column, columns)) {
    RowBits const own = bits.seen().some;
    auto const half_of_own = [&](int index) { return static_cast<uint32_t>(own >> 32 * index); };
    uint32_t const given = __shfl_xor_sync(0xffffffff, half_of_own(1 - half), 1);
    uint32_t const needed = half_of_own(half) | given;  // of the lane's 32 rows, for the columns of both
    and_wide(bits, element_of(matrix, share, first_row + 32 * half, column), matrix.row_stride, needed, half);
  } else if (matrix.data != nullptr) {
    bits.store(staged[warp], lane);
    __syncwarp();  // what the columns' lanes need
    CUTE_NO_UNROLL
    for (int i = lane; i < columns; i += 32) {
      RowBits const needed = staged[warp][i];
      if (needed == 0) continue;
      staged[warp][i] = needed & read_column(element_of(matrix, share, first_row, first_column + i), matrix.row_stride,
                                             needed);
    }
    __syncwarp();  // what these have read
    bits.load(staged[warp], lane);
  }

  int64_t const block_of_all = (int64_t{share.batch} * plan.heads + share.head) * blocks + block;
  if (exists) bits.store(params.bits + block_of_all * plan.columns() + first_column, lane);
  __shared__ TileRows seen[kMatrixWarps][32];
  seen[warp][lane] = bits.seen();
  __syncwarp();  // the lanes' columns of a tile
  if (block >= blocks || lane >= share.tiles) return;
  int const lanes = plan.block_n / (kPairColumns / 2);  // of a key tile
  TileRows of_tile = seen[warp][lane * lanes];
  CUTE_NO_UNROLL
  for (int i = 1; i < lanes; ++i) {
    of_tile.some |= seen[warp][lane * lanes + i].some;
    of_tile.all &= seen[warp][lane * lanes + i].all;
  }
  params.tile_rows[block_of_all * plan.key_tiles + share.first_tile + lane] = of_tile;
}

}  // namespace flash_cute::masks
