// P and dS of a CTA's piece of the scores, by a warpgroup of its own: the sum of the parts, mask, exponential, and dS.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "core/mask.cuh"
#include "sm90/backward/common/place.cuh"
#include "scores.cuh"
#include "side_traits.cuh"

namespace flash_cute::sm90::backward::dq_in_registers_large {

template <class Storage>
CUTE_DEVICE void wait_for_parts(Storage& smem, int step) {
  wait_for_cluster(smem.parts_full, step & 1);  // all CTAs have sent their pieces
  if (fresh_thread_index() % 128 == 0) set_barrier_transaction_bytes(smem.parts_full, kPartBytes);  // of the next step
}

// Sends a piece of P or dS to the CTAs of a side.
template <class Traits, class Storage, class Fragment>
CUTE_DEVICE void send_to_side(Storage& smem, int step, Fragment const& piece, Side side) {
  jitter();
  CUTE_UNROLL
  for (int cta = side; cta < Traits::kCtas; cta += kSides) {
    send_fragment<Traits::kCtas>(smem.fragments[step & 1], smem.fragment_full[step & 1], piece, cta);
  }
}

// P^T = exp(scale S^T - lse) for side dP, dS^T = P^T (dP^T - delta) for side S.
template <class Traits>
CUTE_DEVICE void make_scores_of_keys(KernelArgs const& args, typename Traits::KeysStorage& smem) {
  using Element = typename Traits::Element;
  constexpr int kRows = Traits::kPieceColumns;
  BwdParams const& params = args.params;
  KeyTile const volatile& tile = smem.tile;
  int const steps = row_steps(params, tile), first_row = rank_in_cluster() * kRows;  // of the piece in the tile
  int const whole_begin = uniform(tile.row_tiles.whole_begin);                       // row tiles that need no mask
  int const whole_size = uniform(tile.row_tiles.whole_end) - whole_begin;
  typename Traits::MmaPiece mma;
  auto tSrS = partition_fragment_C(mma, Shape<_64, Int<kRows>>{});                  // (MMA, MMA_N, MMA_M)
  auto tSrdP = make_tensor_like(tSrS);                                              // (MMA, MMA_N, MMA_M)
  auto scores = rowcol_view(tSrS);                                                  // (keys, rows)
  auto dscores = rowcol_view(tSrdP);                                                // (keys, rows)
  auto rP = make_tensor_like<Element>(tSrS);                                        // (MMA, MMA_N, MMA_M)
  auto rdS = make_tensor_like<Element>(tSrS);                                       // (MMA, MMA_N, MMA_M)
  auto cS = make_identity_tensor(Shape<_64, Int<kRows>>{});                         // (keys, rows) -> (key, row)
  auto tScS_0 = rowcol_view(mma.get_slice(_0{}).partition_C(cS));                   // the same of thread 0, static
  auto tScS = rowcol_view(mma.get_slice(fresh_thread_index() % 128).partition_C(cS));
  RowTile row_tile{uniform(tile.first.m_block)};
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    int const m = row_tile.m_block, head = tile.head_kv * params.heads_per_kv + row_tile.head;
    int64_t const first = first_statistic(params, head, tile.first_row_tile, m) + first_row;
    RowStats<kRows> const lse_log2 = read_statistics<kRows>(params.lse_log2 + first);
    RowStats<kRows> const delta = read_statistics<kRows>(params.delta + first);
    wait_for_parts(smem, i);
    sum_pieces<kSides>(smem.parts, kSideS, tSrS);
    auto rF = make_tensor_like<cutlass::half_t>(tSrS);  // (MMA, MMA_N, MMA_M): derivatives of modified scores
    if constexpr (Traits::kVariant.modifies_scores) {
      cap_scores(tSrS, rF, params.score);
      add_bias_transposed(scores, tScS, tScS_0, head_slope(params.score, tile.batch, head),
                          (m - tile.n_block) * kTileRows + first_row + backward::read_band(tile.sequence).shift);
    }
    if (unsigned(m - whole_begin) >= unsigned(whole_size)) {
      apply_mask_transposed(scores, tScS, tScS_0, backward::read_band(tile.sequence), m * kTileRows + first_row,
                            tile.n_block * kTileRows);
    }
    exponentiate(scores, lse_log2, params.scale_log2);
    convert(tSrS, rP);
    if constexpr (Traits::kVariant.modifies_scores) multiply_by_derivatives(tSrS, rF, params.score);
    sum_pieces<kSides>(smem.parts, kSideDp, tSrdP);
    backward::subtract(dscores, delta);
    backward::differentiate(tSrS, tSrdP);
    convert(tSrdP, rdS);
    // Either message says that the parts have been read, and so P comes second: dS waits for all loads of them.
    send_to_side<Traits>(smem, i, rdS, kSideS);
    send_to_side<Traits>(smem, i, rP, kSideDp);
    row_tile.advance(params.heads_per_kv, tile);
  }
}

// dS = exp(scale S - lse) (dP - delta), for both sides.
template <class Traits>
CUTE_DEVICE void make_scores_of_queries(KernelArgs const& args, typename Traits::QueriesStorage& smem) {
  using Element = typename Traits::Element;
  constexpr int kKeys = Traits::kPieceColumns;
  BwdParams const& params = args.params;
  RowTileTask const volatile& tile = smem.tile;
  int const steps = key_steps(tile), first_key = rank_in_cluster() * kKeys;  // of the piece in the tile
  if (steps == 0) return;
  int const whole_begin = uniform(tile.key_tiles.whole_begin);               // key tiles that need no mask
  int const whole_size = uniform(tile.key_tiles.whole_end) - whole_begin;
  int const last_key_tile = uniform(tile.key_tiles.end) - 1, first_row = uniform(tile.m_block) * kTileRows;
  OwnStatistics const own(params, smem.tile);
  typename Traits::MmaPiece mma;
  auto tSrS = partition_fragment_C(mma, Shape<_64, Int<kKeys>>{});                  // (MMA, MMA_M, MMA_N)
  auto tSrdP = make_tensor_like(tSrS);                                              // (MMA, MMA_M, MMA_N)
  auto scores = rowcol_view(tSrS);                                                  // (rows, keys)
  auto dscores = rowcol_view(tSrdP);                                                // (rows, keys)
  auto rdS = make_tensor_like<Element>(tSrS);                                       // (MMA, MMA_M, MMA_N)
  auto cS = make_identity_tensor(Shape<_64, Int<kKeys>>{});                         // (rows, keys) -> (row, key)
  auto tScS_0 = rowcol_view(mma.get_slice(_0{}).partition_C(cS));                   // the same of thread 0, static
  auto tScS = rowcol_view(mma.get_slice(fresh_thread_index() % 128).partition_C(cS));
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    int const n = last_key_tile - i, offset = first_row - n * kTileRows - first_key;  // first row minus first key
    wait_for_parts(smem, i);
    sum_pieces<kSides>(smem.parts, kSideS, tSrS);
    sum_pieces<kSides>(smem.parts, kSideDp, tSrdP);
    auto rF = make_tensor_like<cutlass::half_t>(tSrS);  // (MMA, MMA_M, MMA_N): derivatives of modified scores
    if constexpr (Traits::kVariant.modifies_scores) {
      cap_scores(tSrS, rF, params.score);
      add_bias(scores, tScS, tScS_0, head_slope(params.score, tile.batch, tile.head), offset + tile.sequence.shift);
    }
    if (unsigned(n - whole_begin) >= unsigned(whole_size)) {
      Sequence const sequence = backward::read_band(tile.sequence);
      apply_mask(scores, tScS, tScS_0, sequence, offset, sequence.len_k - n * kTileRows - first_key);
    }
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(row, j) = exp2_approx(scores(row, j) * params.scale_log2 - own.lse_log2[row]);
        dscores(row, j) -= own.delta[row];
      }
    }
    if constexpr (Traits::kVariant.modifies_scores) multiply_by_derivatives(tSrS, rF, params.score);
    backward::differentiate(tSrS, tSrdP);
    convert(tSrdP, rdS);
    send_to_side<Traits>(smem, i, rdS, kSideS);
    send_to_side<Traits>(smem, i, rdS, kSideDp);  // which takes it for a sign that the parts have been read
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
