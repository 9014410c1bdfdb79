// The consumer's loop over row tiles: S^T = K Q^T, P^T, dP^T = V dO^T, dV += P^T dO, dS^T, dK += dS^T Q, dQ = dS K.
//
// A warpgroup's step m, with the tensor cores' work above its own:
//
//     S^T(m)         | dP^T(m), dV += P^T dO        | dK += dS^T Q | dQ(m-1) = dS K
//     waits   P^T(m) | waits dS^T(m), dS(m) to smem | waits        | waits, dQ(m-1) to smem
//
// Without `late_dp`, dP^T is issued together with S^T. With 64 rows per step the warpgroups take turns at dQ, so that a
// warpgroup has the last column in every other step; with 128 rows its half of dQ is issued together with dK.
//
// The warpgroups exchange dS only, and dQ of a step is computed in the next one, so that each waits for something that
// the other did long ago. They stay half a step apart: one uses the tensor cores while the other computes P and dS.
// With both at the same point of the step the kernel is 8 % (head dim 128) to 18 % (64) slower. No WGMMA is in flight
// across the end of an iteration: ptxas would serialise all of them.
#pragma once

#include <cute/tensor.hpp>

#include "../../core/convert.cuh"
#include "../../core/layout.cuh"
#include "../../core/mask.cuh"
#include "task.cuh"
#include "dq.cuh"
#include "scores.cuh"
#include "traits.cuh"
#include "../warpgroup.cuh"

namespace flash_cute::sm90::bwd {

// Accumulates P^T dO in tdVrdV and dS^T Q in tdKrdK.
template <class Traits, class Accumulator>
CUTE_DEVICE void mainloop(KernelArgs const& args, KeyTile const& tile,
                              typename Traits::SharedStorage& smem,
                              Accumulator& tdKrdK,    // (MMA, MMA_N, MMA_D)
                              Accumulator& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kVSteps = Traits::kTile.v_steps;
  constexpr bool kLateDp = Traits::kTile.late_dp, kTurns = Traits::kTurns;
  BwdParams const& params = args.params;
  TileRange const range = row_range<kBlockM, kBlockN>(params, tile.n_block);
  int const thread = threadIdx.x - 128;
  int const warpgroup = uniform(thread / 128);

  // Shared memory.
  auto sQ = make_tensor(make_smem_ptr(smem.q[0]), typename Traits::SmemLayoutQ{});        // (BLK_M, D, stage)
  auto sQt = make_tensor(make_smem_ptr(smem.q[0]), typename Traits::SmemLayoutQt{});      // (D, BLK_M, stage)
  auto sdO = make_tensor(make_smem_ptr(smem.dout[0]), typename Traits::SmemLayoutQ{});    // (BLK_M, D, stage)
  auto sdOt = make_tensor(make_smem_ptr(smem.dout[0]), typename Traits::SmemLayoutQt{});  // (D, BLK_M, stage)
  auto sK = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemLayoutK{});           // (BLK_N, D)
  auto sKt = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemLayoutKt{});         // (D, BLK_N)
  auto sV = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemLayoutK{});           // (BLK_N, D)
  auto sdS = make_tensor(make_smem_ptr(smem.ds[0]), typename Traits::SmemLayoutS{});      // (BLK_M, BLK_N, stage)

  // The MMAs and their operands.
  typename Traits::MmaScores mma_scores;
  typename Traits::MmaScoresRs mma_scores_rs;
  typename Traits::MmaKeys mma_keys;
  typename Traits::MmaQueries mma_queries;
  auto const warpgroup_scores = mma_scores.get_slice(128 * warpgroup);
  auto const warpgroup_keys = mma_keys.get_slice(128 * warpgroup);
  auto tSrK = warpgroup_scores.partition_fragment_A(sK);             // (MMA, MMA_N, MMA_D)
  auto tSrV = warpgroup_scores.partition_fragment_A(sV);             // (MMA, MMA_N, MMA_D)
  auto tSrQ = warpgroup_scores.partition_fragment_B(sQ);             // (MMA, MMA_M, MMA_D, stage)
  auto tSrdO = warpgroup_scores.partition_fragment_B(sdO);           // (MMA, MMA_M, MMA_D, stage)
  auto tdVrdO = warpgroup_keys.partition_fragment_B(sdOt);           // (MMA, MMA_D, MMA_M, stage)
  auto tdKrQ = warpgroup_keys.partition_fragment_B(sQt);             // (MMA, MMA_D, MMA_M, stage)
  auto tdQrdS = mma_queries.get_slice(0).partition_fragment_A(sdS);  // (MMA, MMA_M, MMA_N, stage)
  auto tdQrK = mma_queries.get_slice(0).partition_fragment_B(sKt);   // (MMA, MMA_D, MMA_N)
  auto const copy_v = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma_scores_rs).get_slice(thread);
  auto tSrV_regs = mma_scores_rs.get_slice(thread).partition_fragment_A(sV);  // (MMA, MMA_N, MMA_D)

  auto cS = make_identity_tensor(Shape<Int<kBlockN>, Int<kBlockM>>{});
  auto tScS_0 = rowcol_view(mma_scores.get_slice(_0{}).partition_C(cS));  // (keys, rows) -> (key, row) of thread 0

  // Byte offsets of a warpgroup's share of an operand (its keys of K and V, its rows of dS), and of a chunk of dS^T.
  constexpr uint32_t kKeysBytes = sizeof(Element) * typename Traits::SmemLayoutK{}.layout_b()(64, 0);
  constexpr uint32_t kRowsBytes =
      kTurns ? 0 : sizeof(Element) * typename Traits::SmemLayoutS{}.layout_b()(kBlockM / 2, 0, 0);
  constexpr uint32_t kChunkBytes =
      kBlockM == 64 ? 0 : sizeof(Element) * typename Traits::SmemLayoutSt{}.layout_b()(0, 64, 0);
  Operands const operands(smem);
  uint32_t const thread_ds = ds_place<typename Traits::SmemLayoutSt>(smem.ds[0]);

  // dS is computed in two parts where a step has 64 rows: dK of the first runs while the second is computed.
  constexpr int kParts = kBlockM == 64 ? 2 : 1;
  constexpr int kPartColumns = kBlockM / 4 / kParts;
  auto convert_part = [](auto const& from, auto& to, auto part) {
    constexpr int kSize = decltype(size(from))::value / kParts;
    auto from_part = make_tensor(from.data() + part * kSize, Shape<Int<kSize>>{});
    auto to_part = make_tensor(to.data() + part * kSize, Shape<Int<kSize>>{});
    convert(from_part, to_part);
  };

  static_assert(Traits::kStages == 2 && Traits::kScoreStages == 2);
  int count = tile.begin;
  bool dq_pending = false;  // dQ of the step before is in shared memory, not yet published

  auto issue_dq = [&](int step, auto& tdQrdQ) __attribute__((always_inline)) {
    smem.ds_pipeline.wait_full(at_step(step));  // all consumer warps have stored dS of the step
    auto tdQrdS_all = operands.at(tdQrdS, smem.ds[0], warpgroup * kRowsBytes);  // (MMA, MMA_M, MMA_N, stage)
    auto tdQrdS_now = tdQrdS_all(_, _, _, step & 1);
    issue_gemm<true>(mma_queries, tdQrdS_now, operands.at(tdQrK, smem.k), tdQrdQ);
  };
  auto finish_dq = [&](int step, auto& tdQrdQ) __attribute__((always_inline)) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(tdQrdQ);
    smem.ds_pipeline.release(at_step(step));  // dQ has read dS, whose stage may be overwritten
    store_dq<Traits>(smem, warpgroup, step, tdQrdQ);
  };
  // Publishes dS of the step, and dQ of the step before it if that is pending.
  auto publish = [&](int step) __attribute__((always_inline)) {
    tma_store_fence();  // the async proxy reads them: dS through WGMMA, dQ through bulk copies
    smem.ds_pipeline.arrive_full(at_step(step));
    if (dq_pending) publish_dq<Traits>(smem, warpgroup, step - 1);
    dq_pending = false;
  };
  auto step = [&](int m, auto first, auto computes_dq_before) __attribute__((always_inline)) {
    constexpr bool kFirst = decltype(first)::value;
    constexpr bool kDq = decltype(computes_dq_before)::value;  // computes dQ of the step before
    PipelineState<2> const rows = at_step(count);
    auto tSrS = partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kBlockM>>{});         // (MMA, MMA_N, MMA_M)
    auto tSrdP = partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kBlockM>>{});        // (MMA, MMA_N, MMA_M)
    auto tdQrdQ = partition_fragment_C(mma_queries, Shape<Int<kBlockM>, Int<kHeadDim>>{});     // (MMA, MMA_M, MMA_D)
    auto rP = make_tensor_like<Element>(tSrS);                                                 // (MMA, MMA_N, MMA_M)
    auto rdS = make_tensor_like<Element>(tSrS);                                                // (MMA, MMA_N, MMA_M)
    auto tdVrP = make_tensor(rP.data(), operand_a_layout_64(rP.layout()));                     // (MMA, MMA_N, MMA_K)
    auto tdKrdS = make_tensor(rdS.data(), operand_a_layout_64(rdS.layout()));                  // (MMA, MMA_N, MMA_K)
    auto scores = rowcol_view(tSrS);                                                           // (keys, rows)
    auto dscores = rowcol_view(tSrdP);                                                         // (keys, rows)

    auto issue_dp = [&]() __attribute__((always_inline)) {
      smem.dout_pipeline.wait_full(rows);  // TMA: dO and delta have landed
      auto tSrV_now = operands.at(tSrV, smem.v, warpgroup * kKeysBytes);
      auto tSrdO_now = operands.at(tSrdO, smem.dout[0])(_, _, _, rows.stage);
      if constexpr (kVSteps == 0) {
        issue_gemm<true>(mma_scores, tSrV_now, tSrdO_now, tSrdP);
      } else {
        issue_gemm_rs_ss<kVSteps>(mma_scores_rs, tSrV_regs, mma_scores, tSrV_now, tSrdO_now, tSrdP);
      }
    };

    if (kFirst && warpgroup == 1) named_sync(kHalfStep, Traits::kConsumerThreads);  // warpgroup 0 has issued its dV
    smem.q_pipeline.wait_full(rows);  // TMA: Q and lse_log2 have landed
    auto tSrK_now = operands.at(tSrK, smem.k, warpgroup * kKeysBytes);
    issue_gemm<true>(mma_scores, tSrK_now, operands.at(tSrQ, smem.q[0])(_, _, _, rows.stage), tSrS);
    if (!kLateDp) issue_dp();
    if (!kFirst) publish(count - 1);  // here, where the fence has no store in flight to wait for
    RowStats<kBlockM> const lse_log2(smem.lse_log2[rows.stage]);
    warpgroup_wait<kLateDp ? 0 : 1>();  // S^T
    warpgroup_fence_operand(tSrS);
    if (range.needs_mask(m)) {
      auto tScS = rowcol_view(mma_scores.get_slice(consumer_thread()).partition_C(cS));  // (keys, rows) -> (key, row)
      apply_mask_transposed(scores, tScS, tScS_0, params, m * kBlockM, tile.n_block * kBlockN);
    }
    for_each(make_int_sequence<kParts>{}, [&](auto part) __attribute__((always_inline)) {
      constexpr int kBegin = part * kPartColumns;
      exponentiate(scores, lse_log2, params.scale_log2, kBegin, kBegin + kPartColumns);
      convert_part(tSrS, rP, part);
    });
    if (kLateDp) issue_dp();
    issue_gemm<false>(mma_keys, tdVrP, operands.at(tdVrdO, smem.dout[0])(_, _, _, rows.stage), tdVrdV);
    if (kFirst && warpgroup == 0) named_arrive(kHalfStep, Traits::kConsumerThreads);
    RowStats<kBlockM> const delta(smem.delta[rows.stage]);
    warpgroup_wait<1>();  // dP^T
    warpgroup_fence_operand(tSrdP);
    for_each(make_int_sequence<kParts>{}, [&](auto part) __attribute__((always_inline)) {
      differentiate(rP, dscores, delta, part * kPartColumns, (part + 1) * kPartColumns);
      convert_part(tSrdP, rdS, part);
      if (part == 0) smem.ds_pipeline.wait_empty(rows);  // dQ of two steps before has read this stage of dS
      uint32_t place;
      asm volatile("mov.b32 %0, %1;" : "=r"(place) : "r"(thread_ds));  // else four addresses stay in registers
      store_ds<kChunkBytes, part, kParts>(place + rows.stage * sizeof(smem.ds[0]), rdS);
      issue_gemm<false, part, kParts>(mma_keys, tdKrdS, operands.at(tdKrQ, smem.q[0])(_, _, _, rows.stage), tdKrdK);
    });
    if (kDq && !kTurns) issue_dq(count - 1, tdQrdQ);
    warpgroup_wait<kParts + (kDq && !kTurns)>();  // dV
    warpgroup_fence_operand(tdVrdV);
    smem.dout_pipeline.release(rows);
    warpgroup_wait<0>();  // dK, and dQ if issued
    warpgroup_fence_operand(tdKrdK);
    smem.q_pipeline.release(rows);
    if (kFirst) wait_results_read();
    if (kDq) {
      if (kTurns) issue_dq(count - 1, tdQrdQ);
      finish_dq(count - 1, tdQrdQ);
      dq_pending = true;
    }
    ++count;
  };

  smem.k_pipeline.wait_full({0, tile.keys_phase});  // TMA: K and V of the key tile have landed
  smem.v_pipeline.wait_full({0, tile.keys_phase});
  CUTE_UNROLL
  for (int k = 0; k < kVSteps; ++k) {
    copy(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, copy_v.partition_S(sV)(_, _, k), copy_v.retile_D(tSrV_regs)(_, _, k));
  }
  RowTile row_tile = tile.first;
  step(row_tile.m_block, true_type{}, false_type{});
#pragma unroll 1
  for (int left = tile.end - count; left > 0; --left) {
    row_tile.advance(args.params.group);
    if (computes_dq<Traits>(count - 1, warpgroup)) {
      step(row_tile.m_block, false_type{}, true_type{});
    } else {
      step(row_tile.m_block, false_type{}, false_type{});
    }
  }
  smem.v_pipeline.release({0, tile.keys_phase});
  publish(count - 1);
  if (computes_dq<Traits>(count - 1, warpgroup)) {
    auto tdQrdQ = partition_fragment_C(mma_queries, Shape<Int<kBlockM>, Int<kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
    issue_dq(count - 1, tdQrdQ);
    finish_dq(count - 1, tdQrdQ);
    tma_store_fence();
    publish_dq<Traits>(smem, warpgroup, count - 1);
  }
  smem.k_pipeline.release({0, tile.keys_phase});
}

}  // namespace flash_cute::sm90::bwd
