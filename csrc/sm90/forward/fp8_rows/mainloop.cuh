// The consumer's loop over key tiles, from the last to the first, one product after the other: S = Q K^T, mask,
// softmax, T = P V, O += T.
//
// The tensor cores keep about 14 bits of a float8 product's sums, so that no sum lives there for longer than a tile: T
// is computed into fresh registers and added to O in float32. They are those that S had, which leaves room for one or
// two warpgroups more than S and T at a time. A warpgroup waits for each of its products, while the others work.
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

// Computes one warpgroup's rows of the CTA's tile, whose keys `tiles` has. Leaves the unnormalized O in tOrO and the
// row statistics in softmax; releases Q.
template <class Traits, class Accumulator>
CUTE_DEVICE void mainloop(FwdParams const& params, Fp8Terms const& terms, int tile_number, int warpgroup,
                          typename Traits::SharedStorage& smem, WarpgroupKeys<Traits> const& tiles,
                          Softmax<Traits::kExactLse>& softmax,
                          Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  constexpr int kRows = Traits::kRows, kBlockN = Traits::kBlockN, kPieces = Traits::kPieces;
  constexpr int kBuffers = Traits::kTile.buffers();
  constexpr bool kSumsApart = Traits::kTile.sum_columns() == 0;

  auto q_state = [&] { return Traits::q_state(opaque(tile_number)); };
  auto sQ = make_tensor(make_smem_ptr(smem.q[q_state().stage][warpgroup]), typename Traits::SmemLayoutQ{});  // (64, D)
  auto sK = make_tensor(make_smem_ptr(smem.k[0]), typename Traits::SmemLayoutK{});      // (BLK_N, D, stage)
  auto sVt = make_tensor(make_smem_ptr(smem.vt[0]), typename Traits::SmemLayoutVt{});  // (product, N, pieces, stage)
  auto sOnes = make_tensor(make_smem_ptr(smem.ones), typename Traits::SmemLayoutOnes{});  // (8, 32)

  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  typename Traits::MmaSum mma_sum;
  auto const thread_qk = mma_qk.get_slice(0);  // descriptors are the same for all threads
  auto const thread_pv = mma_pv.get_slice(0);
  auto tSrQ = thread_qk.partition_fragment_A(sQ);                          // (MMA, MMA_M, MMA_D)
  auto tSrK = thread_qk.partition_fragment_B(sK);                          // (MMA, MMA_N, MMA_D, stage)
  auto tTrV = thread_pv.partition_fragment_B(sVt);                         // (MMA, MMA_D, MMA_N, pieces, stage)
  auto tLrOne = mma_sum.get_slice(0).partition_fragment_B(sOnes);          // (MMA, 1, 1)
  auto tLrOnes = make_tensor(tLrOne.data(), make_layout(get<0>(tLrOne.layout()), get<1>(tLrOne.layout()),
                                                        Layout<Int<kBlockN / 32>, _0>{}));  // (MMA, 1, MMA_N), alike
  auto const shape_t = partition_shape_C(mma_pv, Shape<Int<kRows>, Int<Traits::kProduct>>{});  // (MMA, MMA_M, MMA_D)

  auto cS = make_identity_tensor(Shape<Int<kRows>, Int<kBlockN>>{});
  auto tScS_0 = rowcol_view(mma_qk.get_slice(_0{}).partition_C(cS));  // (rows, columns) -> (row, column) of thread 0

  auto tile = [&]() -> TileCoord const volatile& { return smem.tile[opaque(tile_number) & 1]; };
  auto sequence = [&]() -> auto const& { return lengths_of(params, smem.tile[opaque(tile_number) & 1]); };
  auto uniform_lengths = [&]() -> decltype(auto) {
    return uniform_lengths_of(params, smem.tile[opaque(tile_number) & 1]);
  };
  PipelineState<2> state = at_step(tiles.count);  // of the key tile: in K's and in V's ring

  auto offset = [&](int n) { return tiles.first_row - n * kBlockN; };  // of key tile n: first row minus first column
  using Modifier = ScoresOf<Traits::kVariant.modifies_scores, kRows, kBlockN>;
  Modifier modify;
  float factors_qk = 1.f;  // of the warpgroup's rows and, unless each block has its own, of all keys
  // What the scores of key tile n are multiplied by to be exponents; where they are modified, to be q.k.
  auto prepare = [&](int n) {
    float factor = factors_qk;
    if (terms.k.block_stride != 0) {
      TileCoord const volatile& now = tile();
      factor *= block_factor(terms.k, now.batch, now.head_kv, n * kBlockN);
    }
    if constexpr (Traits::kVariant.modifies_scores) {
      return factor;
    } else {
      return factor * params.scale_log2;
    }
  };
  // S of key tile n to P.
  auto compute_p = [&](int n, auto&& mask, auto& tTrP) __attribute__((always_inline)) {
    float scale = prepare(n);
    auto tSrS = partition_fragment_C(mma_qk, Shape<Int<kRows>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
    auto scores = rowcol_view(tSrS);                                              // (rows, columns)
    smem.k_pipeline.wait_full(state);  // TMA: K(n) has landed
    issue_gemm<Accumulate::kOverwrite>(mma_qk, tSrQ, tSrK(_, _, _, state.stage), tSrS);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrS);
    smem.k_pipeline.release(state);
    typename Modifier::Shift shift;
    if constexpr (Traits::kVariant.modifies_scores) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) *= scale;
      scale = params.scale_log2;
      modify(params, scores, tScS_0, offset(n), shift);
    }
    mask(scores, n);
    auto acc = rowcol_view(tOrO);  // (rows, columns)
    softmax.update_max(scores, scale, shift, acc);
    CUTE_UNROLL
    for (int group = 0; group < kBlockN / 32; ++group) {
      softmax.numerators(scores, group, scale, shift);
      convert_numerators(scores, group, tTrP);
    }
  };
  // T, piece by piece, to O; P's sums come with the first one.
  auto add_product = [&](auto& tTrP) __attribute__((always_inline)) {
    auto tTrT = make_tensor<float>(append<4>(shape_t, Int<kBuffers>{}));  // (MMA, MMA_M, MMA_D, buffer)
    auto tLrL = partition_fragment_C(mma_sum, Shape<Int<kRows>, _8>{});   // (MMA, MMA_M, 1), with kSumsApart
    auto issue_piece = [&](auto piece) {
      auto product = tTrT(_, _, _, Int<piece % kBuffers>{});
      if constexpr (kSumsApart && piece == 0) issue_gemm<Accumulate::kOverwrite>(mma_sum, tTrP, tLrOnes, tLrL);
      issue_gemm<Accumulate::kOverwrite>(mma_pv, tTrP, tTrV(_, _, _, piece, state.stage), product);
    };
    for_each(make_int_sequence<kBuffers>{}, issue_piece);
    for_each(make_int_sequence<kPieces>{}, [&](auto piece) __attribute__((always_inline)) {
      constexpr int kWords = Traits::kPiece / 2;  // of a thread
      warpgroup_wait<cute::min(kBuffers, kPieces - piece) - 1>();
      auto product = tTrT(_, _, _, Int<piece % kBuffers>{});
      warpgroup_fence_operand(product);
      if constexpr (piece == 0 && kSumsApart) {
        warpgroup_fence_operand(tLrL);
        softmax.sum[0] += tLrL(0);
        softmax.sum[1] += tLrL(2);
      } else if constexpr (piece == 0) {
        softmax.sum[0] += product(kWords);
        softmax.sum[1] += product(kWords + 2);
      }
      CUTE_UNROLL
      for (int word = 0; word < kWords; ++word) tOrO(piece * kWords + word) += product(word);
      if constexpr (piece + kBuffers < kPieces) issue_piece(Int<piece + kBuffers>{});
    });
  };
  auto step = [&](int n, auto&& mask) __attribute__((always_inline)) {
    auto tTrP = make_tensor<Element>(typename Traits::LayoutP{});  // (MMA, MMA_M, MMA_N)
    compute_p(n, mask, tTrP);
    smem.vt_pipeline.wait_full(state);  // V(n) has been transposed
    add_product(tTrP);
    smem.vt_pipeline.release(state);
    state.advance();
  };

  // A CTA's key tiles are those that any of its rows sees. A warpgroup releases those that none of its own rows sees
  // without using them.
  auto pass_on = [&](int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      smem.k_pipeline.wait_full(state);
      smem.vt_pipeline.wait_full(state);
      __syncwarp();  // all lanes have waited for both
      smem.k_pipeline.release(state);
      smem.vt_pipeline.release(state);
      state.advance();
    }
  };

  clear(tOrO);
  smem.q_pipeline[warpgroup].wait_full(q_state());  // TMA: the warpgroup's rows of Q have landed
  if (tiles.begin == tiles.end) {
    pass_on(tiles.before + tiles.after);
    __syncwarp();  // all lanes have waited for Q
    smem.q_pipeline[warpgroup].release(q_state());
    return;
  }
  pass_on(tiles.after);

  factors_qk = block_factor(terms.q, tile().batch, tile().head, tiles.first_row);
  if (terms.k.block_stride == 0) factors_qk *= block_factor(terms.k, tile().batch, tile().head_kv, 0);
  modify.begin(params, tile(), sequence(),
               [&] { return rowcol_view(mma_qk.get_slice(threadIdx.x % 128).partition_C(cS)); });
  // Masks a tile if it crosses an edge.
  auto mask_at_edge = [&](auto& scores, int n) __attribute__((always_inline)) {
    auto columns = [&] { return sequence().len_k - n * kBlockN; };  // of the tile
    auto mask = [&](int) __attribute__((always_inline)) {  // the columns are read again, as all of a sequence is
      auto tScS = rowcol_view(mma_qk.get_slice(fresh_thread_index() % 128).partition_C(cS));
      apply_mask(scores, tScS, tScS_0, sequence(), offset(n), columns());
    };
    forward::mask_at_edge(params, smem.tile[0], tiles, n, offset(n), columns(), mask);
  };
  // Without a lower edge one loop for the last tile and those at the upper edge, one for the whole tiles; else one
  // loop.
  int n = tiles.end - 1;
  int const last_at_edge =
      uniform_lengths().band.has_lower() ? tiles.begin : min(tiles.whole_end, tiles.end - 1);
  for (; n >= last_at_edge; --n) step(n, mask_at_edge);
  for (; n >= tiles.begin; --n) step(n, [](auto&, int) {});

  smem.q_pipeline[warpgroup].release(q_state());  // the next tile's Q may be loaded
  softmax.finish();
  pass_on(tiles.before);
}

}  // namespace flash_cute::sm90::forward::fp8_rows
