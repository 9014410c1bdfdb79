// What the schedules' mainloops have in common: where the tiles are, the products from shared memory, mask and softmax
// of one tile, and the loop over the key tiles.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "core/mask.cuh"
#include "core/softmax.cuh"
#include "contract/tile_order.h"
#include "sm80/forward/rows/mainloop.cuh"
#include "sm80/common/gemm.cuh"
#include "sm80/common/load_cp_async.cuh"
#include "traits.cuh"

namespace flash_cute::studies::schedules {

using namespace cute;
using Edge = rows::UpperEdge;  // a tile at an edge of the band, or at the end of the keys
using rows::Whole;

// The first element of a row of one head.
template <class Element>
CUTE_DEVICE Element const* row_begin(void const* base, Strides const& strides, int batch, int head, int row) {
  return static_cast<Element const*>(base) + batch * strides.batch + head * strides.head + row * strides.row;
}

CUTE_DEVICE int kv_head(FwdParams const& params, RowTileCoord const& tile) {
  return tile.head / (params.heads_q / params.heads_kv);
}

// The tiles of K or of V of one head, to be loaded from the last one to the first.
template <class Traits>
struct KeyTileLoader {
  using Element = typename Traits::Element;

  Element const* gmem;  // the next tile's first element
  int64_t row_stride;
  int columns;

  CUTE_DEVICE KeyTileLoader(FwdParams const& params, RowTileCoord const& tile, void const* base, Strides const& strides,
                       int last)
      : gmem(row_begin<Element>(base, strides, tile.batch, kv_head(params, tile), last * Traits::kBlockN)),
        row_stride(strides.row),
        columns(params.head_dim) {}

  // `keys`: the rows of the tile that are inside, of a Kind whose tiles may reach past the end.
  template <class Kind, class Smem>
  CUTE_DEVICE void load_next(Kind, Smem&& sX, int keys) {  // (BLK_N, D)
    load_tile<Kind::kRowCheck>(typename Traits::GmemLoad{}, gmem, row_stride, sX, keys, columns);
    gmem -= Traits::kBlockN * row_stride;
  }
};

template <class Traits, class Smem>
CUTE_DEVICE void load_q(FwdParams const& params, RowTileCoord const& tile, Smem&& sQ) {  // (BLK_M, D)
  int const first_row = tile.m_block * Traits::kBlockM;
  auto const* gQ = row_begin<typename Traits::Element>(params.q, params.q_strides, tile.batch, tile.head, first_row);
  load_tile<RowCheck::kEach>(typename Traits::GmemLoad{}, gQ, params.q_strides.row, sQ, params.len_q - first_row,
                             params.head_dim);
}

// A whole operand A in registers.
template <class CopyAtom, class Mma, class Smem>
CUTE_DEVICE auto read_operand_a(Mma const& mma, Smem const& sA) {  // (M, K) -> (MMA, MMA_M, MMA_K)
  using Element = typename Smem::value_type;
  auto const copy_a = make_tiled_copy_A(CopyAtom{}, mma).get_slice(threadIdx.x);
  auto tCrA = fragment_a<Element>(mma, shape(sA));
  copy(CopyAtom{}, copy_a.partition_S(sA), copy_a.retile_D(tCrA));
  return tCrA;
}

// acc += A B^T with A in registers. If `thread` is fresh_thread_index(), addresses are computed again at each call.
template <class CopyAtomB, class Mma, class Acc, class FragA, class SmemB>
CUTE_DEVICE void add_product_rs(Mma const& mma,
                                Acc&& acc,          // (MMA, MMA_M, MMA_N)
                                FragA const& tCrA,  // (MMA, MMA_M, MMA_K)
                                SmemB const& sB,    // (N, K)
                                int thread) {
  auto const copy_b = make_tiled_copy_B(CopyAtomB{}, mma).get_slice(thread);
  auto tCrB = fragment_b<typename SmemB::value_type>(mma, shape(sB));  // (MMA, MMA_N, MMA_K)
  auto tCsB = copy_b.partition_S(sB);                                  // (CPY, CPY_N, CPY_K)
  auto tCrB_copy = copy_b.retile_D(tCrB);                              // (CPY, CPY_N, CPY_K)
  CUTE_STATIC_ASSERT_V(size<1>(tCsB) == size<1>(tCrB_copy) && size<2>(tCsB) == size<2>(tCrB_copy));
  pipelined_gemm(mma, acc, tCrA, tCrB, [&](int k) { copy(CopyAtomB{}, tCsB(_, _, k), tCrB_copy(_, _, k)); });
}

// acc += A B^T with both in shared memory.
template <class CopyAtomA, class CopyAtomB, class Mma, class Acc, class SmemA, class SmemB>
CUTE_DEVICE void add_product_ss(Mma const& mma,
                                Acc&& acc,          // (MMA, MMA_M, MMA_N)
                                SmemA const& sA,    // (M, K)
                                SmemB const& sB,    // (N, K)
                                int thread) {
  auto const copy_a = make_tiled_copy_A(CopyAtomA{}, mma).get_slice(thread);
  auto const copy_b = make_tiled_copy_B(CopyAtomB{}, mma).get_slice(thread);
  auto tCrA = fragment_a<typename SmemA::value_type>(mma, shape(sA));  // (MMA, MMA_M, MMA_K)
  auto tCrB = fragment_b<typename SmemB::value_type>(mma, shape(sB));  // (MMA, MMA_N, MMA_K)
  auto tCsA = copy_a.partition_S(sA);                                  // (CPY, CPY_M, CPY_K)
  auto tCsB = copy_b.partition_S(sB);                                  // (CPY, CPY_N, CPY_K)
  auto tCrA_copy = copy_a.retile_D(tCrA);                              // (CPY, CPY_M, CPY_K)
  auto tCrB_copy = copy_b.retile_D(tCrB);                              // (CPY, CPY_N, CPY_K)
  CUTE_STATIC_ASSERT_V(size<1>(tCsA) == size<1>(tCrA_copy) && size<2>(tCsA) == size<2>(tCrA_copy));
  CUTE_STATIC_ASSERT_V(size<1>(tCsB) == size<1>(tCrB_copy) && size<2>(tCsB) == size<2>(tCrB_copy));
  pipelined_gemm(mma, acc, tCrA, tCrB, [&](int k) {
    copy(CopyAtomA{}, tCsA(_, _, k), tCrA_copy(_, _, k));
    copy(CopyAtomB{}, tCsB(_, _, k), tCrB_copy(_, _, k));
  });
}

// Sets the scores of key tile n outside the band to -inf.
template <class Traits, class Mma, class Scores>
CUTE_DEVICE void mask_scores(FwdParams const& params, RowTileCoord const& tile, int n, Mma const& mma,
                             Scores& scores) {  // (rows, columns)
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  auto cS = make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{});
  auto tScS_0 = rowcol_view(mma.get_slice(_0{}).partition_C(cS));  // (rows, columns) -> (row, column) of thread 0
  auto tScS = rowcol_view(mma.get_slice(fresh_thread_index()).partition_C(cS));  // the same of this one
  apply_mask(scores, tScS, tScS_0, params, tile.m_block * kBlockM - n * kBlockN, params.len_k - n * kBlockN);
}

// Where a warp has whole rows: S of key tile n to P, as the second product's A operand.
template <class Traits, class Kind, class Mma, class Softmax, class FragS, class FragO>
CUTE_DEVICE auto make_numerators(FwdParams const& params, RowTileCoord const& tile, int n, Kind, Mma const& mma,
                                 Softmax& softmax,
                                 FragS& tSrS,    // (MMA, MMA_M, MMA_N)
                                 FragO& tOrO) {  // (MMA, MMA_M, MMA_D)
  auto scores = rowcol_view(tSrS);               // (rows, columns)
  auto acc = rowcol_view(tOrO);                  // (rows, head dim)
  if constexpr (Kind::kMasked) mask_scores<Traits>(params, tile, n, mma, scores);
  softmax.update_max(scores, acc);
  softmax.numerators(scores);
  auto rP = make_tensor_like<typename Traits::Element>(tSrS);  // (MMA, MMA_M, MMA_N)
  convert(tSrS, rP);
  return rP;
}

// (MMA, MMA_M, MMA_N) -> (MMA, MMA_M, MMA_K) of the same registers
template <class FragP>
CUTE_DEVICE auto as_operand_a(FragP& rP) {
  return make_tensor(rP.data(), operand_a_layout(rP.layout()));
}

// The first key tile that a row tile visits, and the first one that all its rows see whole. Computed at each use: kept,
// they spill where O takes most registers.
template <class Traits>
CUTE_DEVICE int first_key_tile(FwdParams const& params, RowTileCoord const& tile) {
  return first_column(params, opaque(tile.m_block) * Traits::kBlockM) / Traits::kBlockN;
}
template <class Traits>
CUTE_DEVICE int first_whole_key_tile(FwdParams const& params, RowTileCoord const& tile) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  return ceil_div(first_column(params, opaque(tile.m_block) * kBlockM + (kBlockM - 1)), kBlockN);
}

// Calls step(n, kind) for the key tiles of a row tile, from the last to the first: those at the band's upper edge, the
// whole ones, and those at its lower edge.
template <class Traits, class Step>
CUTE_DEVICE void for_each_key_tile(FwdParams const& params, RowTileCoord const& tile, TileRange const& range,
                                   Step&& step) {
  int n = range.end - 1;
  for (; n >= range.whole_end; --n) step(n, Edge{});
  for (; n >= first_whole_key_tile<Traits>(params, tile); --n) step(n, Whole{});
  for (; n >= first_key_tile<Traits>(params, tile); --n) step(n, rows::LowerEdge{});
}

// The same with one code for both edges, for steps that are long to compile. What the edges alone need stays in
// registers during the whole tiles too: shared_kv and shared_qkv have none for it and would spill.
template <class Traits, class Step>
CUTE_DEVICE void for_each_key_tile_two_kinds(FwdParams const& params, RowTileCoord const& tile,
                                             TileRange const& range, Step&& step) {
  int n = range.end - 1, edge_end = range.whole_end;
  do {
    for (; n >= edge_end; --n) step(n, Edge{});
    for (; n >= first_whole_key_tile<Traits>(params, tile); --n) step(n, Whole{});
    edge_end = first_key_tile<Traits>(params, tile);
  } while (n >= edge_end);
}

}  // namespace flash_cute::studies::schedules
