// Stores O and the LSE of a row tile, each warpgroup its own rows: of several heads, unlike those of
// sm90/forward/rows/epilogue.cuh.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/fwd_normalize.cuh"
#include "core/layout.cuh"
#include "sm90/forward/rows/epilogue.cuh"
#include "tile.cuh"

namespace flash_cute::sm90::decode::key_chunks {

// Where the results of a row are. `row`: of the sequence.
template <class Element>
CUTE_DEVICE Element* out_row(FwdParams const& params, Sequence const& sequence, int batch, int head, int row) {
  TileCoord const place{.head = head, .batch = batch};
  return static_cast<Element*>(params.out) + out_offset(params, sequence, place, row);
}
CUTE_DEVICE float* lse_row(FwdParams const& params, Sequence const& sequence, int batch, int head, int row) {
  return params.lse + lse_offset(params, sequence, TileCoord{.head = head, .batch = batch}) + row;
}

// A thread's row i of a warpgroup's: computed again at each use, since there are too few registers to keep it.
template <class Traits>
struct ThreadRow {
  int row;  // of the sequence
  int head;
  bool exists;

  CUTE_DEVICE ThreadRow(Tile const& tile, int warpgroup, int i) {
    int const packed = first_row_of_thread(fresh_thread_index() % 128) + 8 * i, position = tile.position(packed);
    row = (tile.m_block * Traits::kWarpgroups + warpgroup) * tile.rows.positions + position;
    head = tile.head + packed - position * tile.rows.heads;
    exists = position < tile.rows.positions && row < tile.sequence.rows;
    if (!exists) head = tile.head;
  }
};

template <class Traits>
CUTE_DEVICE void store_rows(FwdParams const& params, Tile const& tile, int warpgroup,
                            typename Traits::SharedStorage& smem, OnlineSoftmax<2> const& softmax,
                            auto& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    ThreadRow<Traits> const row(tile, warpgroup, i);
    bool const blind = !row_sees_a_key(tile.sequence, row.row);
    if (row.exists && fresh_thread_index() % 4 == 0) {
      *lse_row(params, tile.sequence, tile.batch, row.head, row.row) = blind ? -INFINITY : softmax.lse(i);
    }
    float const inverse = softmax.inverse(i, head_sink_log2<Element>(params.sinks, row.head));
    CUTE_UNROLL
    for (int j = 0; j < size<1>(acc); ++j) acc(i, j) = blind ? 0.f : __fmul_rn(acc(i, j), inverse);
  }
  auto rO = make_tensor_like<Element>(tOrO);  // (MMA, MMA_M, MMA_D)
  convert(tOrO, rO);
  auto const words = rowcol_view(recast<uint32_t>(rO));  // (rows, blocks of 8 columns)
  unsigned const thread = unsigned(fresh_thread_index()) % 128;
  auto const piece = [&] {
    if constexpr (Traits::kOutThroughSmem) {
      return forward::rows::pieces_through_smem(smem.results.out(warpgroup, thread / 32), words, thread);
    } else {
      return forward::rows::pieces_by_shuffles(words, thread);
    }
  }();
  int const column = 8 * (thread % 4), columns = value_columns<Traits>(params) - column;
  CUTE_UNROLL
  for (int i = 0; i < size<0>(words); ++i) {
    ThreadRow<Traits> const row(tile, warpgroup, i);
    Element* const out = out_row<Element>(params, tile.sequence, tile.batch, row.head, row.row) + column;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(words); j += 4) {
      uint4 const block = piece(i, j);
      if (row.exists && 8 * j < columns) *reinterpret_cast<uint4*>(out + 8 * j) = block;
    }
  }
}

}  // namespace flash_cute::sm90::decode::key_chunks
