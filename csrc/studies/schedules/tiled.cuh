// What the tiled schedules share: a ring of column tiles of Q and K, and an epilogue that stores O by column tiles.
//
// Q and K are never whole in shared memory: S is the sum of the products of their column tiles, a few columns each, and
// Q is read again for every key tile. Warps own rows.
#pragma once

#include "core/fwd_normalize.cuh"
#include "pieces.cuh"

namespace flash_cute::studies::schedules {

// Starts the copy of one column tile of Q, K or V of one head.
template <class Traits, class Kind>
struct ColumnTiles {
  using Element = typename Traits::Element;

  Element const* gmem;  // the first row of the rows' tile
  int64_t row_stride;
  int rows;     // of the tile that are inside
  int columns;  // head_dim

  template <class Smem>
  CUTE_DEVICE void load(int column_tile, Smem&& sX) const {  // (BLK, columns)
    int const first = column_tile * Traits::kColumns;
    load_tile<Kind::kRowCheck>(typename Traits::GmemLoad{}, gmem + first, row_stride, sX, rows, columns - first);
  }
};

template <class Traits>
CUTE_DEVICE auto q_columns(FwdParams const& params, RowTileCoord const& tile) {
  int const first_row = opaque(tile.m_block) * Traits::kBlockM;  // else a pointer per column tile is kept
  return ColumnTiles<Traits, Edge>{
      row_begin<typename Traits::Element>(params.q, params.q_strides, tile.batch, tile.head, first_row),
      params.q_strides.row, params.len_q - first_row, params.head_dim};
}

// Of key tile n of K or V.
template <class Traits, class Kind>
CUTE_DEVICE auto key_columns(FwdParams const& params, RowTileCoord const& tile, void const* base,
                             Strides const& strides, int n, Kind) {
  int const first_key = opaque(n) * Traits::kBlockN;
  return ColumnTiles<Traits, Kind>{
      row_begin<typename Traits::Element>(base, strides, tile.batch, kv_head(params, tile), first_key), strides.row,
      params.len_k - first_key, params.head_dim};
}

// Column tile c of the accumulator: (MMA, MMA_M, MMA_D) -> (MMA, MMA_M, MMA_D of the tile)
template <int kTiles, class Accumulator>
CUTE_DEVICE auto column_tile(Accumulator& tOrO, int c) {
  auto const tiled = logical_divide(tOrO.layout(), make_tile(_, _, Int<decltype(size<2>(tOrO))::value / kTiles>{}));
  return make_tensor(tOrO.data(), tiled)(_, _, make_coord(_, c));
}

// Normalizes O and stores it and the LSE; `part`: which of the CTAs of this row tile. Through the first buffer of Q's
// ring, one column tile after the other, when no copy is in flight any more.
template <class Traits, class Softmax, class Accumulator>
CUTE_DEVICE void tiled_epilogue(FwdParams const& params, RowTileCoord const& tile, int part,
                                typename Traits::Storage& smem, Softmax const& softmax,
                                Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  using RowTile = Shape<Int<Traits::kBlockM>, Int<Traits::kColumns>>;
  constexpr int kBlockM = Traits::kBlockM, kColumns = Traits::kColumns;
  int const thread = threadIdx.x, first_row = tile.m_block * kBlockM;
  typename Traits::Mma mma;

  auto acc = rowcol_view(tOrO);  // (rows, columns)
  auto cO = local_tile(make_identity_tensor(Shape<Int<kBlockM>, Int<Traits::kHeadDim>>{}),
                       Shape<Int<kBlockM>, Int<Traits::kOutColumns>>{}, make_coord(_0{}, part));
  auto tOcO = rowcol_view(mma.get_slice(thread).partition_C(cO));  // (rows, columns) -> (row, column)
  float* const lse = params.lse + (int64_t{tile.batch} * params.heads_q + tile.head) * params.len_q;
  normalize(params, lse, first_row, softmax, acc, tOcO, row_factors<Element>(params, softmax, tile.head));

  auto sO = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutQ{})(_, _, _0{});  // (BLK_M, columns)
  auto mO = make_head_tensor(static_cast<Element*>(params.out), params.out_strides, tile.batch, tile.head, params.len_q,
                             params.head_dim);
  auto const copy_o = make_tiled_copy_C(Copy_Atom<UniversalCopy<uint32_t>, Element>{}, mma).get_slice(thread);
  typename Traits::GmemStore gmem_store;
  auto const gmem_thread = gmem_store.get_slice(thread);
  auto const coords = gmem_thread.partition_S(make_identity_tensor(RowTile{}));
  CUTE_UNROLL
  for (int c = 0; c < Traits::kOutTiles; ++c) {
    auto tOrO_tile = column_tile<Traits::kOutTiles>(tOrO, c);  // (MMA, MMA_M, MMA_D)
    auto rO = make_tensor_like<Element>(tOrO_tile);            // (MMA, MMA_M, MMA_D)
    convert(tOrO_tile, rO);
    __syncthreads();  // all have read what the buffer held: the last operands, or the column tile before
    copy(Copy_Atom<UniversalCopy<uint32_t>, Element>{}, copy_o.retile_S(rO), copy_o.partition_D(sO));
    __syncthreads();  // all have written it
    int const out_tile = part * Traits::kOutTiles + c;
    auto gO = local_tile(mO, RowTile{}, make_coord(tile.m_block, out_tile));  // (BLK_M, columns)
    store_tile(gmem_store, gmem_thread.partition_S(sO), gmem_thread.partition_D(gO), coords, params.len_q - first_row,
               params.head_dim - out_tile * kColumns);
  }
}

}  // namespace flash_cute::studies::schedules
