// The consumer's loop over key tiles, from the last to the first: S = Q K^T, mask, softmax, O += P V.
//
// A step issues S(n) and then O += P V of the step before, so that the tensor cores have a product to do while the
// maximum of S(n) is found, and those of the other warpgroups, if there are others, during the rest:
//
//     tensor cores | S(n) | O += P(n+1) V(n+1) |           the others' products          |  S(n-1) | ...
//     warpgroup    |      |     max S(n)       | rescale O?, exp2, sums, convert to P(n) | ...
//
// With ping-pong a warpgroup waits for its turn before S(n) and hands on after issuing both products.
#pragma once

#include <cute/tensor.hpp>

#include "../../core/convert.cuh"
#include "../../core/layout.cuh"
#include "../../core/mask.cuh"
#include "../../core/softmax.cuh"
#include "traits.cuh"
#include "../warpgroup.cuh"

namespace flash_cute::sm90::fwd {

// One warpgroup's rows of one tile. The buffers go round with the count of key tiles. Leaves the numerators' products
// in tOrO and the row statistics in softmax, and frees Q.
template <class Traits, class Accumulator>
CUTE_DEVICE void mainloop(FwdParams const& params, int m_block, KeySpan const keys, int warpgroup,
                              typename Traits::SharedStorage& smem, PipelineState<1> const q_state,
                              OnlineSoftmax<2>& softmax,
                              Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  using Mask = typename Traits::Mask;
  using Turn = TurnRing<Traits::kWarpgroups, Traits::kTile.ping_pong>;
  constexpr int kRows = Traits::kRows, kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  int const thread = threadIdx.x % 128;
  int const first_row = m_block * kBlockM + warpgroup * kRows;

  auto sQ = make_tensor(make_smem_ptr(smem.q[warpgroup]), typename Traits::SmemLayoutQ{});  // (64, D)
  auto sK = make_tensor(make_smem_ptr(smem.k[0]), typename Traits::SmemLayoutK{});          // (BLK_N, D, stage)
  auto sVt = make_tensor(make_smem_ptr(smem.v[0]), typename Traits::SmemLayoutVt{});        // (D, BLK_N, stage)

  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  auto const thread_qk = mma_qk.get_slice(thread);
  auto const thread_pv = mma_pv.get_slice(thread);
  auto tSrQ = thread_qk.partition_fragment_A(sQ);   // (MMA, MMA_M, MMA_D)
  auto tSrK = thread_qk.partition_fragment_B(sK);   // (MMA, MMA_N, MMA_D, stage)
  auto tOrV = thread_pv.partition_fragment_B(sVt);  // (MMA, MMA_D, MMA_N, stage)
  auto tSrS = partition_fragment_C(mma_qk, Shape<Int<kRows>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
  auto rP = make_tensor_like<Element>(tSrS);                                     // (MMA, MMA_M, MMA_N)
  auto tOrP = make_tensor(rP.data(), operand_a_layout_64(rP.layout()));       // (MMA, MMA_M, MMA_K)
  auto scores = rowcol_view(tSrS);                                               // (rows, columns)
  auto acc = rowcol_view(tOrO);                                                  // (rows, head dim)

  auto cS = make_identity_tensor(Shape<Int<kRows>, Int<kBlockN>>{});
  auto tScS = rowcol_view(thread_qk.partition_C(cS));                       // (rows, columns) -> (row, column)
  auto tScS_0 = rowcol_view(mma_qk.get_slice(_0{}).partition_C(cS));        // the same of thread 0

  // The CTA's key tiles are those of its last row; a warpgroup only passes on those that none of its own
  // rows sees: [end, cta_end).
  int const begin = keys.begin, cta_end = keys.end;
  KeyRange const range = key_range<Mask, kRows, kBlockN>(params, m_block * Traits::kWarpgroups + warpgroup);
  int const end = first_row < params.len_q ? max(begin, min(cta_end, range.end)) : begin;

  static_assert(Traits::kStages == 2);
  PipelineState<2> k_state = at_step(keys.count), v_state = at_step(keys.count);
  auto issue_qk = [&] { issue_gemm<true>(mma_qk, tSrQ, tSrK(_, _, _, k_state.stage), tSrS); };
  auto issue_pv = [&] { issue_gemm<false>(mma_pv, tOrP, tOrV(_, _, _, v_state.stage), tOrO); };
  auto release_k = [&] {
    smem.k_pipeline.release(k_state);
    k_state.advance();
  };
  auto release_v = [&] {
    smem.v_pipeline.release(v_state);
    v_state.advance();
  };
  // S(n) to P(n), and the accumulator to their maximum.
  auto finish_scores = [&](int n, auto masked, auto wait_product, auto release) {
    if constexpr (decltype(masked)::value) {
      apply_mask<Mask>(scores, tScS, tScS_0, params, first_row, n * kBlockN);
    }
    softmax.update_max<Traits::kTile.late_wait>(scores, acc, wait_product, release);
    softmax.numerators(scores);
    convert(tSrS, rP);  // no branch between: the conversions run while the exponentials come
  };
  auto step = [&](int n, auto masked) {
    smem.k_pipeline.wait_full(k_state);
    Turn::take(warpgroup);
    issue_qk();
    smem.v_pipeline.wait_full(v_state);
    issue_pv();  // of n + 1
    Turn::hand_on(warpgroup);
    warpgroup_wait<1>();
    warpgroup_fence_operand(tSrS);
    release_k();
    auto const wait_product = [&] {
      warpgroup_wait<0>();
      warpgroup_fence_operand(tOrO);
    };
    finish_scores(n, masked, wait_product, release_v);
  };

  clear(tOrO);
  smem.q_pipeline[warpgroup].wait_full(q_state);
  for (int n = cta_end - 1; n >= end; --n) {
    smem.k_pipeline.wait_full(k_state);
    release_k();
    smem.v_pipeline.wait_full(v_state);
    release_v();
    if (n > begin) {  // a tile has one turn fewer than steps: its first product is issued out of turn
      Turn::take(warpgroup);
      Turn::hand_on(warpgroup);
    }
  }
  if (end == begin) {
    __syncwarp();  // all lanes have waited for Q
    smem.q_pipeline[warpgroup].release(q_state);
    return;
  }

  int n = end - 1;
  smem.k_pipeline.wait_full(k_state);
  issue_qk();
  warpgroup_wait<0>();
  warpgroup_fence_operand(tSrS);
  release_k();
  finish_scores(n, true_type{}, [] {}, [] {});
  --n;
  if constexpr (!std::is_same_v<Mask, FullMask>) {
    for (; n >= max(begin, range.unmasked); --n) step(n, true_type{});
  }
  for (; n >= begin; --n) step(n, false_type{});

  smem.q_pipeline[warpgroup].release(q_state);
  smem.v_pipeline.wait_full(v_state);
  issue_pv();
  softmax.finish<Element>();
  warpgroup_wait<0>();
  warpgroup_fence_operand(tOrO);
  smem.v_pipeline.release(v_state);
}

}  // namespace flash_cute::sm90::fwd
