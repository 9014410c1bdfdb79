// The consumer's loop over row tiles: S^T = K Q^T, P^T, dP^T = V dO^T, dV += P^T dO, dS^T, dK += dS^T Q, dQ = dS K.
//
// A step begins with S^T already issued by the step before, and every product runs under something else:
//
//     tensor cores | dP^T(m)    | dV += P^T dO | dK += dS^T Q | dQ(m) = dS K | S^T(m+1)    | dP^T(m+1) ...
//     the others   | P^T(m)     | dS^T(m)      | dS to smem   |              | dQ to smem  | P^T(m+1)  ...
//
// dS is the one thing that the warpgroups exchange. It has two buffers: who passes the barrier of a step knows
// that everybody's dQ of the step before is done, and so writes the other buffer freely.
#pragma once

#include <cute/tensor.hpp>

#include "../core/convert.cuh"
#include "../core/layout.cuh"
#include "../core/mask.cuh"
#include "../core/softmax.cuh"
#include "bwd_args.cuh"
#include "bwd_dq.cuh"
#include "bwd_traits.cuh"
#include "warpgroup.cuh"

namespace flash_cute::sm90 {

// Leaves P^T dO in tdVrdV and dS^T Q in tdKrdK.
template <class Traits, class Accumulator>
CUTE_DEVICE void bwd_mainloop(BwdArgs const& args, KeyTile const& tile, RowRange const range,
                              typename Traits::SharedStorage& smem,
                              Accumulator& tdKrdK,    // (MMA, MMA_N, MMA_D)
                              Accumulator& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  using Element = typename Traits::Element;
  using Mask = typename Traits::Mask;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  BwdParams const& params = args.params;
  int const thread = threadIdx.x - 128;
  int const warpgroup = __shfl_sync(0xffffffff, thread / 128, 0);

  // Shared memory.
  auto sQ = make_tensor(make_smem_ptr(smem.q[0]), typename Traits::SmemLayoutQ{});        // (BLK_M, D, stage)
  auto sQt = make_tensor(make_smem_ptr(smem.q[0]), typename Traits::SmemLayoutQt{});      // (D, BLK_M, stage)
  auto sdO = make_tensor(make_smem_ptr(smem.dout[0]), typename Traits::SmemLayoutQ{});    // (BLK_M, D, stage)
  auto sdOt = make_tensor(make_smem_ptr(smem.dout[0]), typename Traits::SmemLayoutQt{});  // (D, BLK_M, stage)
  auto sK = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemLayoutK{});           // (BLK_N, D)
  auto sKt = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemLayoutKt{});         // (D, BLK_N)
  auto sV = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemLayoutK{});           // (BLK_N, D)
  auto sdS = make_tensor(make_smem_ptr(smem.ds[0]), typename Traits::SmemLayoutS{});      // (BLK_M, BLK_N, stage)
  auto sdSt = make_tensor(make_smem_ptr(smem.ds[0]), typename Traits::SmemLayoutSt{});    // (BLK_N, BLK_M, stage)

  // Products.
  typename Traits::MmaScores mma_scores;
  typename Traits::MmaKeys mma_keys;
  typename Traits::MmaQueries mma_queries;
  auto const warpgroup_scores = mma_scores.get_slice(128 * warpgroup);
  auto const warpgroup_keys = mma_keys.get_slice(128 * warpgroup);
  auto const warpgroup_queries = mma_queries.get_slice(128 * warpgroup);
  auto tSrK = warpgroup_scores.partition_fragment_A(sK);      // (MMA, MMA_N, MMA_D)
  auto tSrV = warpgroup_scores.partition_fragment_A(sV);      // (MMA, MMA_N, MMA_D)
  auto tSrQ = warpgroup_scores.partition_fragment_B(sQ);      // (MMA, MMA_M, MMA_D, stage)
  auto tSrdO = warpgroup_scores.partition_fragment_B(sdO);    // (MMA, MMA_M, MMA_D, stage)
  auto tdVrdO = warpgroup_keys.partition_fragment_B(sdOt);    // (MMA, MMA_D, MMA_M, stage)
  auto tdKrQ = warpgroup_keys.partition_fragment_B(sQt);      // (MMA, MMA_D, MMA_M, stage)
  auto tdQrdS = warpgroup_queries.partition_fragment_A(sdS);  // (MMA, MMA_M, MMA_N, stage)
  auto tdQrK = warpgroup_queries.partition_fragment_B(sKt);   // (MMA, MMA_D, MMA_N)

  auto tSrS = partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kBlockM>>{});   // (MMA, MMA_N, MMA_M)
  auto tSrdP = partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kBlockM>>{});  // (MMA, MMA_N, MMA_M)
  auto tdQrdQ = partition_fragment_C(mma_queries, Shape<Int<kBlockM>, Int<Traits::kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
  auto rP = make_tensor_like<Element>(tSrS);                            // (MMA, MMA_N, MMA_M)
  auto rdS = make_tensor_like<Element>(tSrS);                           // (MMA, MMA_N, MMA_M)
  auto tdVrP = make_tensor(rP.data(), operand_a_layout_64(rP.layout()));    // (MMA, MMA_N, MMA_K)
  auto tdKrdS = make_tensor(rdS.data(), operand_a_layout_64(rdS.layout()));  // (MMA, MMA_N, MMA_K)
  auto scores = rowcol_view(tSrS);                                      // (keys, rows)
  auto dscores = rowcol_view(tSrdP);                                    // (keys, rows)
  // 64 rows: P^T stays in float32 until dS^T. For 128 rows there are no registers; 16 bits cost an instruction more.
  auto p = rowcol_view([&]() -> auto& {
    if constexpr (kBlockM == 64) return tSrS; else return rP;
  }());  // (keys, rows)

  auto cS = make_identity_tensor(Shape<Int<kBlockN>, Int<kBlockM>>{});
  auto tScS_0 = rowcol_view(mma_scores.get_slice(_0{}).partition_C(cS));  // (keys, rows) -> (key, row) of thread 0
  auto const copy_ds = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma_scores);

  // A row statistic of this thread's rows j to j + 3 of scores, which StatOrder has put side by side.
  auto four_rows = [&](float const* stat, int j) {
    return reinterpret_cast<float4 const*>(stat)[j + consumer_thread() % 4];
  };

  constexpr int kParts = kBlockM == 64 ? 2 : 1;  // 128 rows: 2 would spill
  constexpr int kPartColumns = decltype(size<1>(scores))::value / kParts;
  auto convert_part = [](auto const& from, auto& to, auto part) {
    constexpr int kSize = decltype(size(from))::value / kParts;
    auto from_part = make_tensor(from.data() + part * kSize, Shape<Int<kSize>>{});
    auto to_part = make_tensor(to.data() + part * kSize, Shape<Int<kSize>>{});
    convert(from_part, to_part);
  };

  PipelineState<Traits::kStages> q_state, dout_state;
  int ds_stage = 0;
  PipelineState<1> dq_state;
  bool dq_stored = false;  // one waits in shared memory to be made known

  auto issue_scores = [&] {
    smem.q_pipeline.wait_full(q_state);
    issue_gemm<true>(mma_scores, tSrK, tSrQ(_, _, _, q_state.stage), tSrS);
  };
  // Row tile m, whose S^T is complete. Ends with the next one's S^T complete, if there is one.
  auto step = [&](int m, auto last) __attribute__((always_inline)) {
    constexpr bool kLast = decltype(last)::value;
    smem.dout_pipeline.wait_full(dout_state);
    issue_gemm<true>(mma_scores, tSrV, tSrdO(_, _, _, dout_state.stage), tSrdP);
    if (dq_stored) {
      tma_store_fence();  // dQ is read by TMA; here, where the fence has nothing to wait for
      publish_dq<Traits>(smem, warpgroup, dq_state);
    }
    dq_stored = true;
    if (m < range.unmasked) {
      auto tScS = rowcol_view(mma_scores.get_slice(consumer_thread()).partition_C(cS));  // (keys, rows) -> (key, row)
      apply_mask_transposed<Mask>(scores, tScS, tScS_0, params, m * kBlockM, tile.n_block * kBlockN);
    }
    // In parts, so that the tensor cores have the first part's product while the second is being made.
    for_each(make_int_sequence<kParts>{}, [&](auto part) __attribute__((always_inline)) {
      CUTE_UNROLL
      for (int j = part * kPartColumns; j < (part + 1) * kPartColumns; j += 4) {
        float4 const lse = four_rows(smem.lse_log2[q_state.stage], j);
        CUTE_UNROLL
        for (int i = 0; i < size<0>(scores); ++i) {
          scores(i, j) = exp2_approx(scores(i, j) * params.scale_log2 - lse.x);
          scores(i, j + 1) = exp2_approx(scores(i, j + 1) * params.scale_log2 - lse.y);
          scores(i, j + 2) = exp2_approx(scores(i, j + 2) * params.scale_log2 - lse.z);
          scores(i, j + 3) = exp2_approx(scores(i, j + 3) * params.scale_log2 - lse.w);
        }
      }
      convert_part(tSrS, rP, part);
      issue_gemm<false, part, kParts>(mma_keys, tdVrP, tdVrdO(_, _, _, dout_state.stage), tdVrdV);
    });
    warpgroup_wait<kParts>();  // dP^T
    warpgroup_fence_operand(tSrdP);
    for_each(make_int_sequence<kParts>{}, [&](auto part) __attribute__((always_inline)) {
      CUTE_UNROLL
      for (int j = part * kPartColumns; j < (part + 1) * kPartColumns; j += 4) {
        float4 const delta = four_rows(smem.delta[dout_state.stage], j);
        CUTE_UNROLL
        for (int i = 0; i < size<0>(dscores); ++i) {
          dscores(i, j) = float(p(i, j)) * (dscores(i, j) - delta.x);
          dscores(i, j + 1) = float(p(i, j + 1)) * (dscores(i, j + 1) - delta.y);
          dscores(i, j + 2) = float(p(i, j + 2)) * (dscores(i, j + 2) - delta.z);
          dscores(i, j + 3) = float(p(i, j + 3)) * (dscores(i, j + 3) - delta.w);
        }
      }
      convert_part(tSrdP, rdS, part);
      issue_gemm<false, part, kParts>(mma_keys, tdKrdS, tdKrQ(_, _, _, q_state.stage), tdKrdK);
    });
    auto const thread_copy = copy_ds.get_slice(consumer_thread());
    copy(copy_ds, thread_copy.retile_S(rdS), thread_copy.partition_D(sdSt(_, _, ds_stage)));  // (CPY, CPY_N, CPY_M)
    tma_store_fence();         // dS is read by WGMMA, that is by the async proxy
    warpgroup_wait<kParts>();  // dV
    warpgroup_fence_operand(tdVrdV);
    smem.dout_pipeline.release(dout_state);
    dout_state.advance();
    named_sync(kScores, Traits::kConsumerThreads);
    auto tdQrdS_stage = tdQrdS(_, _, _, ds_stage);  // (MMA, MMA_M, MMA_N)
    issue_gemm<true>(mma_queries, tdQrdS_stage, tdQrK, tdQrdQ);
    ds_stage ^= 1;
    warpgroup_wait<1>();  // dK
    warpgroup_fence_operand(tdKrdK);
    smem.q_pipeline.release(q_state);
    q_state.advance();
    if constexpr (!kLast) issue_scores();  // of the next step
    warpgroup_wait<kLast ? 0 : 1>();       // dQ
    warpgroup_fence_operand(tdQrdQ);
    store_dq<Traits>(smem, warpgroup, dq_state, tdQrdQ);
    warpgroup_wait<0>();  // S^T: in flight across the loop's end, it would have all products serialised
    warpgroup_fence_operand(tSrS);
  };

  clear(tdKrdK);
  clear(tdVrdV);
  if (range.begin == range.end) return;
  smem.k_pipeline.wait_full({});
  issue_scores();
  smem.v_pipeline.wait_full({});
  warpgroup_wait<0>();
  warpgroup_fence_operand(tSrS);
  int m = range.end - 1;
  for (int steps = args.group * (range.end - range.begin); steps > 1; --steps) {
    step(m, false_type{});
    if (m-- == range.begin) m = range.end - 1;
  }
  step(m, true_type{});
  tma_store_fence();
  publish_dq<Traits>(smem, warpgroup, dq_state);
}

}  // namespace flash_cute::sm90
