// Copies of tiles of a (length, head dim) matrix between global and shared memory, in 16-byte chunks.
#pragma once

#include <cute/tensor.hpp>

#include "core/registers.cuh"

namespace flash_cute::sm80 {

using namespace cute;

// One head of a tensor: (length, head dim). The copies below touch no row or column outside it.
template <class Element, class Params>
CUTE_DEVICE auto make_head_tensor(Element* base, Params const& strides, int batch, int head, int length, int head_dim) {
  int64_t const offset = batch * strides.batch + head * strides.head;
  return make_tensor(make_gmem_ptr(base + offset), make_shape(length, head_dim), make_stride(strides.row, _1{}));
}

// Whether rows of a tile may lie past the end of the tensor.
enum class RowCheck {
  kNone,  // the caller knows that none does
  kEach,
};

// Starts the copy of one tile by cp.async. Elements past `rows` or `columns` are not read but filled with zeros, so
// that memory after the tensor, NaN included, has no influence.
template <RowCheck kRowCheck, class TiledCopy, class Element, class Smem>
CUTE_DEVICE void load_tile(TiledCopy const& tiled_copy,
                           Element const* gmem,  // the tile's first element
                           int64_t row_stride,   // in elements
                           Smem&& sX,            // (BLK, D)
                           int rows, int columns, int thread) {
  using Chunk = SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>;
  auto const slice = tiled_copy.get_slice(thread);
  auto tXsX = slice.partition_D(sX);                                     // (CPY, CPY_ROW, CPY_COLUMN)
  auto cX = make_identity_tensor(make_shape(size<0>(sX), size<1>(sX)));  // (BLK, D) -> (row, column)
  auto tXcX = slice.partition_S(cX);                                     // (CPY, CPY_ROW, CPY_COLUMN) -> (row, column)
  CUTE_STATIC_ASSERT_V(size<1>(tXsX) == size<1>(tXcX));
  CUTE_STATIC_ASSERT_V(size<2>(tXsX) == size<2>(tXcX));
  int const first_row = get<0>(tXcX(_0{}, _0{}, _0{}));
  int const first_column = get<1>(tXcX(_0{}, _0{}, _0{}));
  int const row_step = get<0>(tXcX(_0{}, _1{}, _0{})) - first_row;
  gmem += first_row * row_stride + first_column;
  CUTE_UNROLL
  for (int r = 0; r < size<1>(tXsX); ++r) {
    bool const row_inside = kRowCheck == RowCheck::kNone || get<0>(tXcX(_0{}, r, _0{})) < rows;
    CUTE_UNROLL
    for (int c = 0; c < size<2>(tXsX); ++c) {
      int const column = get<1>(tXcX(_0{}, _0{}, c));
      Chunk::copy(*reinterpret_cast<uint128_t const*>(gmem + (column - first_column)),
                  *reinterpret_cast<uint128_t*>(&tXsX(_0{}, r, c)), row_inside && column < columns);
    }
    gmem += row_step * row_stride;
    gmem = opaque(gmem);  // else the compiler keeps a 64-bit offset for each r
  }
}

template <RowCheck kRowCheck, class TiledCopy, class Element, class Smem>
CUTE_DEVICE void load_tile(TiledCopy const& tiled_copy, Element const* gmem, int64_t row_stride, Smem&& sX, int rows,
                           int columns) {
  load_tile<kRowCheck>(tiled_copy, gmem, row_stride, sX, rows, columns, fresh_thread_index());
}

// Stores the rows below `rows` and the columns below `columns` of one tile.
template <class TiledCopy, class Smem, class Gmem, class Coords>
CUTE_DEVICE void store_tile(TiledCopy const& tiled_copy,
                            Smem const& tXsX,    // (CPY, CPY_ROW, CPY_COLUMN)
                            Gmem&& tXgX,         // (CPY, CPY_ROW, CPY_COLUMN)
                            Coords const& tXcX,  // (CPY, CPY_ROW, CPY_COLUMN) -> (row, column)
                            int rows, int columns) {
  CUTE_STATIC_ASSERT_V(size<1>(tXsX) == size<1>(tXgX) && size<1>(tXsX) == size<1>(tXcX));
  CUTE_STATIC_ASSERT_V(size<2>(tXsX) == size<2>(tXgX) && size<2>(tXsX) == size<2>(tXcX));
  CUTE_UNROLL
  for (int r = 0; r < size<1>(tXsX); ++r) {
    if (get<0>(tXcX(_0{}, r, _0{})) >= rows) continue;
    CUTE_UNROLL
    for (int c = 0; c < size<2>(tXsX); ++c) {
      if (get<1>(tXcX(_0{}, _0{}, c)) < columns) {
        copy(tiled_copy, tXsX(_, r, c), tXgX(_, r, c));
      }
    }
  }
}

}  // namespace flash_cute::sm80
