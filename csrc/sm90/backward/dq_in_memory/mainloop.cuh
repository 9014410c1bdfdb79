// The consumer's loop over row tiles: S^T = K Q^T, P^T, dP^T = V dO^T, dV += P^T dO, dS^T, dK += dS^T Q, dQ = dS K.
//
// A warpgroup's step m, with the tensor cores' work above its own:
//
//     S^T(m)         | dP^T(m), dV += P^T dO        | dK += dS^T Q | dQ(m-1) = dS K
//     waits   P^T(m) | waits dS^T(m), dS(m) to smem | waits        | waits, dQ(m-1) to smem
//
// Without `late_dp`, dP^T is issued together with S^T. With 64 rows per step the warpgroups alternate at dQ, so that a
// warpgroup has the last column in every other step; with 128 rows its half of dQ is issued together with dK.
//
// The warpgroups exchange dS only, and dQ of a step is computed in the next one, so that each waits for something that
// the other did long ago. They stay half a step apart: one uses the tensor cores while the other computes P and dS.
// With both at the same point of the step the kernel is 8 % (head dim 128) to 18 % (64) slower. No WGMMA is in flight
// across the end of an iteration: ptxas would serialise all of them.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "core/registers.cuh"
#include "sm90/backward/common/modified_scores.cuh"
#include "sm90/backward/common/place.cuh"
#include "task.cuh"
#include "dq.cuh"
#include "sm90/backward/common/scores.cuh"
#include "step_mask.cuh"
#include "traits.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

// Byte offsets of a warpgroup's share of an operand: its keys of K and V, its rows of dS.
template <class Traits>
constexpr uint32_t kKeysBytes = sizeof(typename Traits::Element) * typename Traits::SmemLayoutK{}.layout_b()(64, 0);
template <class Traits>
constexpr uint32_t kRowsBytes =
    Traits::kAlternates ? 0
                   : sizeof(typename Traits::Element) *
                         typename Traits::SmemLayoutS{}.layout_b()(Traits::kBlockM / 2, 0, 0);

template <class Traits>
using SmemOperands = Operands<typename Traits::SharedStorage>;
template <class Traits>
using DqShape = Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>;

// Waits for K and V of a key tile, and returns this thread's part of V's first `v_steps` k steps.
template <class Traits>
CUTE_DEVICE auto wait_keys(typename Traits::SharedStorage& smem, KeyTile const& tile) {
  using LoadV = Copy_Atom<SM75_U32x4_LDSM_N, typename Traits::Element>;
  typename Traits::MmaScoresRs mma;
  int const thread = threadIdx.x - 128;
  auto const copy_v = make_tiled_copy_A(LoadV{}, mma).get_slice(thread);
  auto sV = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemLayoutK{});  // (BLK_N, D)
  auto tSrV = mma.get_slice(thread).partition_fragment_A(sV);                    // (MMA, MMA_N, MMA_D)
  auto tXsV = copy_v.partition_S(sV);                                            // (CPY, CPY_N, CPY_D)
  auto tXrV = copy_v.retile_D(tSrV);                                             // (CPY, CPY_N, CPY_D)
  CUTE_STATIC_ASSERT_V(size<1>(tXsV) == size<1>(tXrV));
  CUTE_STATIC_ASSERT_V(size<2>(tXsV) == size<2>(tXrV));
  static_assert(Traits::kTile.v_steps <= decltype(size<2>(tXrV))::value);
  smem.k_pipeline.wait_full({0, tile.keys_phase});  // TMA: K and V of the key tile have landed
  smem.v_pipeline.wait_full({0, tile.keys_phase});
  CUTE_UNROLL
  for (int k = 0; k < Traits::kTile.v_steps; ++k) copy(LoadV{}, tXsV(_, _, k), tXrV(_, _, k));
  return tSrV;
}

// S^T = K Q^T.
template <class Traits, class FragK, class FragQ, class Scores>
CUTE_DEVICE void issue_scores(typename Traits::SharedStorage& smem, SmemOperands<Traits> const& operands, int warpgroup,
                              PipelineState<2> rows,
                              FragK const& tSrK,  // (MMA, MMA_N, MMA_D)
                              FragQ const& tSrQ,  // (MMA, MMA_M, MMA_D, stage)
                              Scores& tSrS) {     // (MMA, MMA_N, MMA_M)
  typename Traits::MmaScores mma;
  smem.q_pipeline.wait_full(rows);                                                  // TMA: Q and lse_log2 have landed
  auto tSrK_now = operands.at(tSrK, smem.k, warpgroup * kKeysBytes<Traits>);        // (MMA, MMA_N, MMA_D)
  auto tSrQ_now = operands.at(tSrQ, smem.q[0])(_, _, _, rows.stage);                // (MMA, MMA_M, MMA_D)
  issue_gemm<Accumulate::kOverwrite>(mma, tSrK_now, tSrQ_now, tSrS);
}

// dP^T = V dO^T, or added to dP^T with kDeltaWithQ, with V's first `v_steps` k steps from registers.
template <class Traits, class FragV, class FragDo, class VRegs, class Scores>
CUTE_DEVICE void issue_dp(typename Traits::SharedStorage& smem, SmemOperands<Traits> const& operands, int warpgroup,
                          PipelineState<2> rows,
                          FragV const& tSrV,    // (MMA, MMA_N, MMA_D)
                          VRegs& tSrV_regs,     // (MMA, MMA_N, MMA_D): the same in registers
                          FragDo const& tSrdO,  // (MMA, MMA_M, MMA_D, stage)
                          Scores& tSrdP) {      // (MMA, MMA_N, MMA_M)
  constexpr Accumulate kAccumulate = Traits::kDeltaWithQ ? Accumulate::kAdd : Accumulate::kOverwrite;
  typename Traits::MmaScores mma;
  smem.dout_pipeline.wait_full(rows);                                                   // TMA: dO has landed
  auto tSrV_now = operands.at(tSrV, smem.v, warpgroup * kKeysBytes<Traits>);            // (MMA, MMA_N, MMA_D)
  auto tSrdO_now = operands.at(tSrdO, smem.dout[0])(_, _, _, rows.stage);               // (MMA, MMA_M, MMA_D)
  if constexpr (Traits::kTile.v_steps == 0) {
    issue_gemm<kAccumulate>(mma, tSrV_now, tSrdO_now, tSrdP);
  } else {
    typename Traits::MmaScoresRs mma_rs;
    issue_gemm_rs_ss<kAccumulate, Traits::kTile.v_steps>(mma_rs, tSrV_regs, mma, tSrV_now, tSrdO_now, tSrdP);
  }
}

// Waits for S^T, and turns it into P^T. `mask`: see step_mask.cuh. Of modified scores, `shift()` and `slope()` are the
// row's position and the head's slope in base 2; P^T is in rP, tSrS is P^T times the derivative, and with kDeltaWithQ
// tSrdP is -delta, as it is with a mask.
template <class Traits, class Mask, class Shift, class Slope, class Scores, class Rounded>
CUTE_DEVICE void compute_p(typename Traits::SharedStorage& smem, BwdParams const& params, Mask const& mask,
                           Shift const& shift, Slope const& slope, PipelineState<2> rows,
                           Scores& tSrS,   // (MMA, MMA_N, MMA_M)
                           Scores& tSrdP,  // (MMA, MMA_N, MMA_M)
                           Rounded& rP) {  // (MMA, MMA_N, MMA_M)
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  auto scores = rowcol_view(tSrS);  // (keys, rows)
  constexpr bool kModified = Traits::kVariant.modifies_scores;
  RowStats<kBlockM> const lse_log2(smem.lse_log2[rows.stage]);
  Reach reach = Reach::kAny;
  TileBias bias{};
  if constexpr (kModified) {
    reach = reach_of_tile<kBlockM>(params.score, params.scale_log2, smem.lse_log2[rows.stage]);
    if (params.score.slopes != nullptr) {
      bias = {.slope_log2 = slope(), .offset = mask.offset() + shift()};
    }
  }
  warpgroup_wait<Traits::kTile.late_dp ? 0 : 1>();  // S^T
  warpgroup_fence_operand(tSrS);
  bool const masked = mask.is_needed();
  // delta is read four rows at a time between the exponentials, which hide its latency; it reuses the LSE's registers.
  [[maybe_unused]] RowStats<kBlockM> delta;
  auto const read_delta = [&](int four) __attribute__((always_inline)) {
    if constexpr (Traits::kDeltaWithQ) delta.read(smem.delta[rows.stage], four);
  };
  auto const set_to_delta = [&]() __attribute__((always_inline)) {
    if constexpr (Traits::kDeltaWithQ && kBlockM == 64) {
      set_to_negative_here(rowcol_view(tSrdP), delta);
    } else if constexpr (Traits::kDeltaWithQ) {  // there it spilled
      set_to_negative(rowcol_view(tSrdP), delta);
    }
  };
  auto const exponentiate_with = [&](auto terms) __attribute__((always_inline)) {
    typename Traits::MmaScores mma;
    auto cS = make_identity_tensor(Shape<Int<kBlockN>, Int<kBlockM>>{});        // (BLK_N, BLK_M) -> (key, row)
    auto tScS = rowcol_view(mma.get_slice(consumer_thread()).partition_C(cS));  // (keys, rows) -> (key, row)
    auto tScS_0 = rowcol_view(mma.get_slice(_0{}).partition_C(cS));             // the same of thread 0, static
    exponentiate_modified<terms>(scores, tScS, tScS_0, lse_log2, params.score, params.scale_log2, bias, read_delta, rP);
    set_to_delta();
  };
  if constexpr (kModified) {
    if (reach == Reach::kAny && params.score.softcap_scale != 0.f) cap_scores(tSrS, params.score);
  }
  if (masked) {
    typename Traits::MmaScores mma;
    auto cS = make_identity_tensor(Shape<Int<kBlockN>, Int<kBlockM>>{});             // (BLK_N, BLK_M) -> (key, row)
    auto tScS = rowcol_view(mma.get_slice(consumer_thread()).partition_C(cS));       // (keys, rows) -> (key, row)
    auto tScS_0 = rowcol_view(mma.get_slice(_0{}).partition_C(cS));                  // the same of thread 0, static
    mask.apply(scores, tScS, tScS_0);
  }
  if constexpr (kModified) return with_terms(params.score, reach, exponentiate_with);
  if constexpr (Traits::kVariant.reads_mask) {
    exponentiate(scores, lse_log2, params.scale_log2, read_delta);
    set_to_delta();
  } else {
    exponentiate(scores, lse_log2, params.scale_log2);
  }
}

// dV += P^T dO.
template <class Traits, class Rounded, class FragDo, class Accumulator>
CUTE_DEVICE void issue_dv(typename Traits::SharedStorage& smem, SmemOperands<Traits> const& operands,
                          PipelineState<2> rows,
                          Rounded& rP,            // (MMA, MMA_N, MMA_M)
                          FragDo const& tdVrdO,   // (MMA, MMA_D, MMA_K, stage)
                          Accumulator& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  typename Traits::MmaKeys mma;
  auto tdVrP = make_tensor(rP.data(), operand_a_layout_64(rP.layout()));                  // (MMA, MMA_N, MMA_K)
  auto tdVrdO_now = operands.at(tdVrdO, smem.dout[0])(_, _, _, rows.stage);               // (MMA, MMA_D, MMA_K)
  issue_gemm<Accumulate::kAdd>(mma, tdVrP, tdVrdO_now, tdVrdV);
}

// Waits for dP^T, turns it into dS^T, which it stores in shared memory at `ds()` for dQ, and issues dK += dS^T Q.
// `tSrP`: of modified scores times the derivative.
template <class Traits, class DsAddress, class Scores, class FragQ, class Accumulator>
CUTE_DEVICE void compute_ds_and_issue_dk(typename Traits::SharedStorage& smem, SmemOperands<Traits> const& operands,
                                         DsAddress const& ds, PipelineState<2> rows,
                                         Scores const& tSrP,     // (MMA, MMA_N, MMA_M)
                                         Scores& tSrdP,          // (MMA, MMA_N, MMA_M)
                                         FragQ const& tdKrQ,     // (MMA, MMA_D, MMA_K, stage)
                                         Accumulator& tdKrdK) {  // (MMA, MMA_N, MMA_D)
  typename Traits::MmaKeys mma;
  auto rdS = make_tensor_like<typename Traits::Element>(tSrdP);                       // (MMA, MMA_N, MMA_M)
  auto tdKrdS = make_tensor(rdS.data(), operand_a_layout_64(rdS.layout()));           // (MMA, MMA_N, MMA_K)
  RowStats<Traits::kBlockM> delta;
  if constexpr (!Traits::kDeltaWithQ) delta = RowStats<Traits::kBlockM>(smem.delta[rows.stage]);
  warpgroup_wait<1>();  // dP^T
  warpgroup_fence_operand(tSrdP);
  if constexpr (!Traits::kDeltaWithQ) {
    auto dscores = rowcol_view(tSrdP);  // (keys, rows)
    subtract(dscores, delta);
  }
  for_each(make_int_sequence<Traits::kDsShares>{}, [&](auto share) __attribute__((always_inline)) {
    constexpr Share kShare{.index = share, .of = Traits::kDsShares};
    differentiate<kShare>(tSrP, tSrdP);
    convert_share<kShare>(tSrdP, rdS);
    if (share == 0) smem.ds_pipeline.wait_empty(rows);  // dQ of two steps before has read this stage of dS
    store_ds<Traits, kShare>(ds() + rows.stage * sizeof(smem.ds[0]), rdS);
    auto tdKrQ_now = operands.at(tdKrQ, smem.q[0])(_, _, _, rows.stage);  // (MMA, MMA_D, MMA_K)
    issue_gemm<Accumulate::kAdd, kShare>(mma, tdKrdS, tdKrQ_now, tdKrdK);
  });
}

// dQ = dS K, or the warpgroup's half of it.
template <class Traits, class FragDs, class FragK, class Dq>
CUTE_DEVICE void issue_dq(typename Traits::SharedStorage& smem, SmemOperands<Traits> const& operands, int warpgroup,
                          int step,
                          FragDs const& tdQrdS,  // (MMA, MMA_M, MMA_K, stage)
                          FragK const& tdQrK,    // (MMA, MMA_D, MMA_K)
                          Dq& tdQrdQ) {          // (MMA, MMA_M, MMA_D)
  typename Traits::MmaQueries mma;
  smem.ds_pipeline.wait_full(at_step(step));  // all consumer warps have stored dS of the step
  auto tdQrdS_all = operands.at(tdQrdS, smem.ds[0], warpgroup * kRowsBytes<Traits>);  // (MMA, MMA_M, MMA_K, stage)
  auto tdQrdS_now = tdQrdS_all(_, _, _, step & 1);                                    // (MMA, MMA_M, MMA_K)
  issue_gemm<Accumulate::kOverwrite>(mma, tdQrdS_now, operands.at(tdQrK, smem.k), tdQrdQ);
}

// Waits for dQ, and stores it in shared memory.
template <class Traits, class Dq>
CUTE_DEVICE void finish_dq(typename Traits::SharedStorage& smem, int warpgroup, int step,
                           Dq& tdQrdQ) {  // (MMA, MMA_M, MMA_D)
  warpgroup_wait<0>();
  warpgroup_fence_operand(tdQrdQ);
  smem.ds_pipeline.release(at_step(step));  // dQ has read dS, whose stage may be overwritten
  store_dq<Traits>(smem, warpgroup, step, tdQrdQ);
}

// The first step of a key tile sets the distance of half a step between the warpgroups. The others may have to compute
// dQ of the step before them.
enum class StepKind { kFirst, kWithDq, kWithoutDq };

// Accumulates P^T dO in tdVrdV and dS^T Q in tdKrdK.
//
// A long function: its parts, the lambdas, work on the same dozen of tensors and pipeline states, which functions would
// all take as arguments. `step` is a row tile, of the phases above; the loop over them is at the end.
template <class Traits, class Accumulator>
CUTE_DEVICE void mainloop(KernelArgs const& args, KeyTile const& tile, int task_number,
                          typename Traits::SharedStorage& smem,
                          Accumulator& tdKrdK,    // (MMA, MMA_N, MMA_D)
                          Accumulator& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  constexpr bool kLateDp = Traits::kTile.late_dp, kAlternates = Traits::kAlternates;
  static_assert(Traits::kStages == 2 && Traits::kScoreStages == 2);
  BwdParams const& params = args.params;
  auto const task = [&]() -> auto const& { return smem.task[opaque(task_number) & 1]; };
  auto const range = [&] {
    if constexpr (Traits::kVariant.reads_mask) return TileRange{};
    else return row_range<kBlockM, kBlockN>(uniform_lengths_of(params, smem.task[task_number & 1]), tile.n_block);
  }();
  int const warpgroup = uniform((int(threadIdx.x) - 128) / 128);

  // The operands in shared memory.
  auto sQ = make_tensor(make_smem_ptr(smem.q[0]), typename Traits::SmemLayoutQ{});        // (BLK_M, D, stage)
  auto sQt = make_tensor(make_smem_ptr(smem.q[0]), typename Traits::SmemLayoutQt{});      // (D, BLK_M, stage)
  auto sdO = make_tensor(make_smem_ptr(smem.dout[0]), typename Traits::SmemLayoutQ{});    // (BLK_M, D, stage)
  auto sdOt = make_tensor(make_smem_ptr(smem.dout[0]), typename Traits::SmemLayoutQt{});  // (D, BLK_M, stage)
  auto sK = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemLayoutK{});           // (BLK_N, D)
  auto sKt = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemLayoutKt{});         // (D, BLK_N)
  auto sV = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemLayoutK{});           // (BLK_N, D)
  auto sdS = make_tensor(make_smem_ptr(smem.ds[0]), typename Traits::SmemLayoutS{});      // (BLK_M, BLK_N, stage)

  // Their descriptors, of which the phases recompute the addresses.
  typename Traits::MmaScores mma_scores;
  typename Traits::MmaQueries mma_queries;
  auto const warpgroup_scores = mma_scores.get_slice(128 * warpgroup);
  auto const warpgroup_keys = typename Traits::MmaKeys{}.get_slice(128 * warpgroup);
  auto tSrK = warpgroup_scores.partition_fragment_A(sK);             // (MMA, MMA_N, MMA_D)
  auto tSrV = warpgroup_scores.partition_fragment_A(sV);             // (MMA, MMA_N, MMA_D)
  auto tSrQ = warpgroup_scores.partition_fragment_B(sQ);             // (MMA, MMA_M, MMA_D, stage)
  auto tSrdO = warpgroup_scores.partition_fragment_B(sdO);           // (MMA, MMA_M, MMA_D, stage)
  auto tdVrdO = warpgroup_keys.partition_fragment_B(sdOt);           // (MMA, MMA_D, MMA_K, stage)
  auto tdKrQ = warpgroup_keys.partition_fragment_B(sQt);             // (MMA, MMA_D, MMA_K, stage)
  auto tdQrdS = mma_queries.get_slice(0).partition_fragment_A(sdS);  // (MMA, MMA_M, MMA_K, stage)
  auto tdQrK = mma_queries.get_slice(0).partition_fragment_B(sKt);   // (MMA, MMA_D, MMA_K)
  SmemOperands<Traits> const operands(smem);
  uint32_t const kept_ds = ds_address<typename Traits::SmemLayoutSt>(smem.ds[0]);
  auto const ds = [&] {
    if constexpr (Traits::kKeepsDsAddress) {
      return opaque(kept_ds);  // else four addresses stay in registers
    } else {
      return ds_address<typename Traits::SmemLayoutSt>(smem.ds[0]);
    }
  };

  int number = tile.begin;  // of the step
  bool dq_pending = false;  // dQ of the step before is in shared memory, not yet published
  // Publishes dS of the step, and dQ of the step before it if that is pending.
  auto publish = [&](int step) __attribute__((always_inline)) {
    tma_store_fence();  // the async proxy reads them: dS through WGMMA, dQ through bulk copies
    smem.ds_pipeline.arrive_full(at_step(step));
    if (dq_pending) publish_dq<Traits>(smem, warpgroup, step - 1);
    dq_pending = false;
  };
  auto tSrV_regs = wait_keys<Traits>(smem, tile);  // (MMA, MMA_N, MMA_D)
  RowTile row_tile = tile.first;
  int heads_before = 0;  // whose turn is over
  auto const slope = [&] {
    int const head = tile.head_kv * params.heads_per_kv + heads_before + row_tile.head;
    return params.scale_log2 * head_slope(params.score, tile.batch, head);
  };
  auto const shift = [&] { return shift_of(params, task()); };
  auto const mask_of_step = [&](int m_block) __attribute__((always_inline)) {
    if constexpr (Traits::kVariant.reads_mask) {
      return ColumnsOfStep<Traits, decltype(task)>{params, task, tile.n_block, smem.visits.at(number)};
    } else {
      return BandOfStep<Traits, decltype(task)>{params, task, range, tile.n_block, m_block};
    }
  };
  auto step = [&](int m_block, auto kind) __attribute__((always_inline)) {
    constexpr bool kFirst = kind == StepKind::kFirst, kDq = kind == StepKind::kWithDq;
    PipelineState<2> const rows = at_step(number);
    auto tSrS = partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kBlockM>>{});   // (MMA, MMA_N, MMA_M)
    auto tSrdP = partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kBlockM>>{});  // (MMA, MMA_N, MMA_M)
    auto tdQrdQ = partition_fragment_C(mma_queries, DqShape<Traits>{});                  // (MMA, MMA_M, MMA_D)
    auto rP = make_tensor_like<typename Traits::Element>(tSrS);                          // (MMA, MMA_N, MMA_M)

    if (kFirst && warpgroup == 1) named_sync(kHalfStep, Traits::kConsumerThreads);  // warpgroup 0 has issued its dV
    issue_scores<Traits>(smem, operands, warpgroup, rows, tSrK, tSrQ, tSrS);
    if (!kLateDp) issue_dp<Traits>(smem, operands, warpgroup, rows, tSrV, tSrV_regs, tSrdO, tSrdP);
    if (!kFirst) publish(number - 1);  // here, where the fence has no store in flight to wait for
    constexpr bool kModified = Traits::kVariant.modifies_scores;
    // Where it comes with Q. Beside a mask or modified scores compute_p reads it.
    constexpr bool kDeltaHere = Traits::kDeltaWithQ && !kModified && !Traits::kVariant.reads_mask;
    [[maybe_unused]] RowStats<kBlockM> delta;
    if constexpr (kDeltaHere) delta = RowStats<kBlockM>(smem.delta[rows.stage]);
    compute_p<Traits>(smem, params, mask_of_step(m_block), shift, slope, rows, tSrS, tSrdP, rP);
    if constexpr (kDeltaHere) set_to_negative(rowcol_view(tSrdP), delta);
    if (kLateDp) issue_dp<Traits>(smem, operands, warpgroup, rows, tSrV, tSrV_regs, tSrdO, tSrdP);
    if constexpr (!kModified) convert(tSrS, rP);
    issue_dv<Traits>(smem, operands, rows, rP, tdVrdO, tdVrdV);
    if (kFirst && warpgroup == 0) named_arrive(kHalfStep, Traits::kConsumerThreads);
    compute_ds_and_issue_dk<Traits>(smem, operands, ds, rows, tSrS, tSrdP, tdKrQ, tdKrdK);
    if (kDq && !kAlternates) issue_dq<Traits>(smem, operands, warpgroup, number - 1, tdQrdS, tdQrK, tdQrdQ);
    warpgroup_wait<Traits::kDsShares + (kDq && !kAlternates)>();  // dV
    warpgroup_fence_operand(tdVrdV);
    smem.dout_pipeline.release(rows);
    warpgroup_wait<0>();  // dK, and dQ if issued
    warpgroup_fence_operand(tdKrdK);
    smem.q_pipeline.release(rows);
    if (kFirst) wait_results_read();
    if (kDq) {
      if (kAlternates) issue_dq<Traits>(smem, operands, warpgroup, number - 1, tdQrdS, tdQrK, tdQrdQ);
      finish_dq<Traits>(smem, warpgroup, number - 1, tdQrdQ);
      dq_pending = true;
    }
    ++number;
  };

  step(row_tile.m_block, C<StepKind::kFirst>{});
  // A pass is the row tiles of all query heads in alternation or, with a window, those of one: a loop of its own, so
  // that the order costs a step nothing.
  bool const one_head_after_another = tile.last_row_tile >= 0;
  int const alternating = one_head_after_another ? 1 : params.heads_per_kv;
  int left = one_head_after_another ? tile.first.m_block - tile.last_row_tile : tile.end - tile.begin - 1;
  // What the loop over a pass does not need is read again after it: kept in registers, it spilled at head dim 64.
  auto const tile_again = [&] {
    return read_uniform(static_cast<KeyTile const volatile&>(smem.task[opaque(task_number) & 1]));
  };
#pragma unroll 1
  for (;;) {
#pragma unroll 1
    for (; left > 0; --left) {
      row_tile.advance(alternating);
      if (computes_dq<Traits>(number - 1, warpgroup)) {
        step(row_tile.m_block, C<StepKind::kWithDq>{});
      } else {
        step(row_tile.m_block, C<StepKind::kWithoutDq>{});
      }
    }
    KeyTile const again = tile_again();
    if (number == again.end) break;
    row_tile.m_block = again.first.m_block + 1;
    left = row_tile.m_block - again.last_row_tile;
    ++heads_before;
  }
  int const keys_phase = tile_again().keys_phase;
  smem.v_pipeline.release({0, keys_phase});
  publish(number - 1);
  if (computes_dq<Traits>(number - 1, warpgroup)) {
    auto tdQrdQ = partition_fragment_C(mma_queries, DqShape<Traits>{});  // (MMA, MMA_M, MMA_D)
    issue_dq<Traits>(smem, operands, warpgroup, number - 1, tdQrdS, tdQrK, tdQrdQ);
    finish_dq<Traits>(smem, warpgroup, number - 1, tdQrdQ);
    tma_store_fence();
    publish_dq<Traits>(smem, warpgroup, number - 1);
  }
  smem.k_pipeline.release({0, keys_phase});
}

}  // namespace flash_cute::sm90::backward::dq_in_memory
