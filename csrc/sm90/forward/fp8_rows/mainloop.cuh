// The consumer's loop over key tiles, from the last to the first: S = Q K^T, mask, softmax, O = O * factor + P V.
//
// The tensor cores keep about 14 bits of a float8 product's sums, so that no sum lives there for longer than a tile: P V
// is computed into fresh registers, kPiece columns at a time, and added to O in float32. The addition is the one that
// rescales O, too.
//
// A step issues S(n) and then the first piece of P V of the step before, so that the tensor cores run that while the
// maximum of S(n) is computed. The exponentials run while the other pieces do.
#pragma once

#include <cute/tensor.hpp>

#include "core/layout.cuh"
#include "core/mask.cuh"
#include "core/registers.cuh"
#include "core/score.cuh"
#include "descale.cuh"
#include "softmax.cuh"
#include "sm90/common/warpgroup.cuh"
#include "sm90/forward/common/place.cuh"
#include "sm90/forward/common/scores.cuh"
#include "sm90/forward/common/warpgroup_keys.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::fp8_rows {

// Computes one warpgroup's rows of the CTA's tile, whose keys `tiles` has. Leaves the unnormalized O in tOrO and the row
// statistics in softmax, with kReadsAhead the next tile in `tiles`; releases Q.
template <class Traits, class Accumulator>
CUTE_DEVICE void mainloop(FwdParams const& params, Fp8Terms const& terms, int tile_number, int warpgroup,
                          typename Traits::SharedStorage& smem, WarpgroupKeys<Traits>& tiles,
                          Softmax<Traits::kExactLse>& softmax,
                          Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D, pieces)
  using Element = typename Traits::Element;
  using Turn = TurnRing<Traits::kWarpgroups, Traits::kTile.ping_pong>;
  constexpr int kRows = Traits::kRows, kBlockN = Traits::kBlockN, kPieces = Traits::kPieces;

  auto q_state = [&] { return Traits::q_state(opaque(tile_number)); };
  auto sQ = make_tensor(make_smem_ptr(smem.q[q_state().stage][warpgroup]), typename Traits::SmemLayoutQ{});  // (64, D)
  auto sK = make_tensor(make_smem_ptr(smem.k[0]), typename Traits::SmemLayoutK{});      // (BLK_N, D, stage)
  auto sVt = make_tensor(make_smem_ptr(smem.vt[0]), typename Traits::SmemLayoutVt{});   // (piece, BLK_N, pieces, stage)
  auto sOnes = make_tensor(make_smem_ptr(smem.ones), typename Traits::SmemLayoutOnes{});  // (8, 32)

  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  typename Traits::MmaSum mma_sum;
  auto const thread_qk = mma_qk.get_slice(0);  // descriptors are the same for all threads
  auto const thread_pv = mma_pv.get_slice(0);
  auto tSrQ = thread_qk.partition_fragment_A(sQ);                          // (MMA, MMA_M, MMA_D)
  auto tSrK = thread_qk.partition_fragment_B(sK);                          // (MMA, MMA_N, MMA_D, stage)
  auto tOrV = thread_pv.partition_fragment_B(sVt);                         // (MMA, MMA_D, MMA_N, pieces, stage)
  auto tLrOne = mma_sum.get_slice(0).partition_fragment_B(sOnes);          // (MMA, 1, 1)
  auto tLrOnes = make_tensor(tLrOne.data(), make_layout(get<0>(tLrOne.layout()), get<1>(tLrOne.layout()),
                                                        Layout<Int<kBlockN / 32>, _0>{}));  // (MMA, 1, MMA_N), all the same
  auto tSrS = partition_fragment_C(mma_qk, Shape<Int<kRows>, Int<kBlockN>>{});          // (MMA, MMA_M, MMA_N)
  auto tOrT = partition_fragment_C(mma_pv, Shape<Int<kRows>, Int<Traits::kPiece>>{});   // (MMA, MMA_M, MMA_D)
  auto tLrL = partition_fragment_C(mma_sum, Shape<Int<kRows>, _8>{});                   // (MMA, MMA_M, 1)
  auto tOrP = make_tensor<Element>(typename Traits::LayoutP{});                          // (MMA, MMA_M, MMA_N)
  auto scores = rowcol_view(tSrS);  // (rows, columns)

  auto cS = make_identity_tensor(Shape<Int<kRows>, Int<kBlockN>>{});
  auto tScS_0 = rowcol_view(mma_qk.get_slice(_0{}).partition_C(cS));  // (rows, columns) -> (row, column) of thread 0

  auto tile = [&]() -> TileCoord const volatile& { return smem.tile[opaque(tile_number) & 1]; };
  auto sequence = [&]() -> auto const& { return lengths_of(params, smem.tile[opaque(tile_number) & 1]); };
  auto uniform_lengths = [&]() -> decltype(auto) {
    return uniform_lengths_of(params, smem.tile[opaque(tile_number) & 1]);
  };
  PipelineState<2> k_state = at_step(tiles.count), v_state = k_state;
  auto issue_qk = [&] {
    issue_gemm<Accumulate::kOverwrite>(mma_qk, tSrQ, tSrK(_, _, _, k_state.stage), tSrS);
  };
  // Columns of P V of the tile before; with the first ones P's sums.
  auto issue_pv = [&](auto piece) {
    if constexpr (piece == 0) issue_gemm<Accumulate::kOverwrite>(mma_sum, tOrP, tLrOnes, tLrL);
    issue_gemm<Accumulate::kOverwrite>(mma_pv, tOrP, tOrV(_, _, _, piece, v_state.stage), tOrT);
  };
  auto wait_product = [&] {
    warpgroup_wait<0>();
    warpgroup_fence_operand(tOrT);
  };
  // Adds a piece of the product to O.
  auto add_piece = [&](auto piece) {
    auto acc = rowcol_view(tOrO(_, _, _, piece));  // (rows, columns of the piece)
    auto product = rowcol_view(tOrT);
    CUTE_UNROLL
    for (int i = 0; i < size<0>(acc); ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(acc); ++j) acc(i, j) = acc(i, j) * softmax.factor[i] + product(i, j);
    }
    if constexpr (piece == 0) {
      warpgroup_fence_operand(tLrL);
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) softmax.sum[i] = softmax.sum[i] * softmax.factor[i] + tLrL(2 * i);
    }
  };
  auto release_k = [&] {
    smem.k_pipeline.release(k_state);
    k_state.advance();
  };
  auto release_v = [&] {
    smem.vt_pipeline.release(v_state);
    v_state.advance();
  };

  int offset;  // the key tile's: the tile's first row minus its first column
  using Modifier = ScoresOf<Traits::kVariant.modifies_scores, kRows, kBlockN>;
  Modifier modify;
  float factor_q = 1.f;  // of the warpgroup's rows
  float factor_k = 1.f;  // of all keys, unless each block has its own
  // What the scores of key tile n are multiplied by to be exponents; where they are modified, to be q.k.
  auto prepare = [&](int n) {
    float factor = factor_q;
    if (terms.k.block_stride == 0) {
      factor *= factor_k;
    } else {
      TileCoord const volatile& now = tile();
      factor *= block_factor(terms.k, now.batch, now.head_kv, n * kBlockN);
    }
    if constexpr (Traits::kVariant.modifies_scores) {
      return factor;
    } else {
      return factor * params.scale_log2;
    }
  };
  auto modify_scores = [&](float& scale, auto& shift) {
    if constexpr (Traits::kVariant.modifies_scores) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) *= scale;
      scale = params.scale_log2;
      modify(params, scores, tScS_0, offset, shift);
    }
  };

  auto step = [&](int n, auto&& mask) __attribute__((always_inline)) {
    float scale = prepare(n);
    smem.k_pipeline.wait_full(k_state);  // TMA: K(n) has landed
    Turn::take(warpgroup);               // the warpgroup before has issued its GEMMs
    issue_qk();
    smem.vt_pipeline.wait_full(v_state);  // V(n+1) has been transposed
    issue_pv(_0{});                       // of the key tile before
    Turn::hand_on(warpgroup);
    warpgroup_wait<2>();  // S(n)
    warpgroup_fence_operand(tSrS);
    release_k();
    typename Modifier::Shift shift;
    modify_scores(scale, shift);
    mask();
    float2 const factors = softmax.update_max(scores, scale, shift);
    for_each(make_int_sequence<kPieces>{}, [&](auto piece) __attribute__((always_inline)) {
      wait_product();
      add_piece(piece);
      if constexpr (piece + 1 < kPieces) {
        issue_pv(Int<piece + 1>{});
      } else {
        release_v();
      }
      softmax.template numerators<piece, kPieces>(scores, scale, shift);
    });
    softmax.factor[0] = factors.x;
    softmax.factor[1] = factors.y;
    convert_numerators(scores, tOrP);
  };

  // A CTA's key tiles are those that any of its rows sees. A warpgroup releases those that none of its own rows sees
  // without using them, and hands on its turns.
  auto pass_on = [&](int count, int turns) {
#pragma unroll 1
    for (; count > 0; --count) {
      smem.k_pipeline.wait_full(k_state);
      release_k();
      smem.vt_pipeline.wait_full(v_state);
      release_v();
      if (--turns < 0) continue;
      Turn::take(warpgroup);
      Turn::hand_on(warpgroup);
    }
  };
  auto read_next = [&] {
    if constexpr (Traits::kReadsAhead) tiles.read(params, smem, tile_number + 1, warpgroup);
  };

  clear(tOrO);
  smem.q_pipeline[warpgroup].wait_full(q_state());  // TMA: the warpgroup's rows of Q have landed
  if (tiles.begin == tiles.end) {
    int const count = tiles.before + tiles.after;
    pass_on(count, count - 1);  // one turn fewer than key tiles, as in every warpgroup: the first S needs no turn
    __syncwarp();               // all lanes have waited for Q
    smem.q_pipeline[warpgroup].release(q_state());
    read_next();
    return;
  }
  pass_on(tiles.after, tiles.after);

  int left = tiles.end - tiles.begin - 1;  // key tiles after this one
  offset = tiles.first_row - (tiles.end - 1) * kBlockN;
  factor_q = block_factor(terms.q, tile().batch, tile().head, tiles.first_row);
  factor_k = block_factor(terms.k, tile().batch, tile().head_kv, 0);
  modify.begin(params, tile(), sequence(),
               [&] { return rowcol_view(mma_qk.get_slice(threadIdx.x % 128).partition_C(cS)); });
  auto mask = [&](int columns) __attribute__((always_inline)) {
    auto tScS = rowcol_view(mma_qk.get_slice(fresh_thread_index() % 128).partition_C(cS));
    apply_mask(scores, tScS, tScS_0, sequence(), offset, columns);
  };
  // Masks a tile if it crosses an edge. Where the band is in shared memory, a tile's number tells, from registers.
  auto mask_at_edge = [&](int n, int columns) __attribute__((always_inline)) {
    if constexpr (Traits::kVariant.reads_sequences) {
      if (unsigned(n - tiles.whole_begin) >= unsigned(tiles.whole_end - tiles.whole_begin)) mask(columns);
    } else {
      if (columns < kBlockN || crosses_band<kRows, kBlockN>(params, offset)) mask(columns);
    }
  };
  {
    float scale = prepare(tiles.end - 1);
    smem.k_pipeline.wait_full(k_state);
    issue_qk();
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrS);
    release_k();
    typename Modifier::Shift shift;
    modify_scores(scale, shift);
    mask_at_edge(tiles.end - 1, uniform_lengths().len_k - (tiles.end - 1) * kBlockN);
    softmax.update_max(scores, scale, shift);
    softmax.template numerators<0, 1>(scores, scale, shift);
    convert_numerators(scores, tOrP);
  }
  // As in rows/mainloop.cuh: without a lower edge one loop for the tiles at the upper edge, one for the whole tiles.
  if (!uniform_lengths().band.has_lower()) {
    for (int const whole = tiles.whole_end - tiles.begin; left > whole; --left) {
      offset += kBlockN;
      step(tiles.begin + left - 1, [&] { mask(kBlockN); });
    }
    for (; left > 0; --left) {
      if constexpr (Traits::kVariant.modifies_scores) offset += kBlockN;
      step(tiles.begin + left - 1, [] {});
    }
  }
  for (; left > 0; --left) {
    offset += kBlockN;
    step(tiles.begin + left - 1, [&] { mask_at_edge(tiles.begin + left - 1, kBlockN); });
  }

  smem.q_pipeline[warpgroup].release(q_state());  // the last S has been computed: the next tile's Q may be loaded
  smem.vt_pipeline.wait_full(v_state);            // V of the last key tile has been transposed
  issue_pv(_0{});
  softmax.finish();
  int const before = tiles.before;
  if (before == 0) read_next();
  for_each(make_int_sequence<kPieces>{}, [&](auto piece) __attribute__((always_inline)) {
    wait_product();
    add_piece(piece);
    if constexpr (piece + 1 < kPieces) issue_pv(Int<piece + 1>{});
  });
  release_v();
  if (before > 0) {
    pass_on(before, before);
    read_next();
  }
}

}  // namespace flash_cute::sm90::forward::fp8_rows
