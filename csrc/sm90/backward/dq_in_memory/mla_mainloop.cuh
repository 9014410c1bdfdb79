// The consumer's loop over row tiles for head dims of q and v of 192 and 128. The products are those of mainloop.cuh,
// but the sums of dK and dV take 160 registers per thread. So that the rest fits, P^T waits for dP^T in float16, which
// is nearly exact beside bfloat16 inputs. A warpgroup's step m:
//
//     S^T(m)       | dP^T(m)                 | dV += P^T dO , dK += dS^T Q | dQ = dS K
//     waits P^T(m) | waits dS^T(m) P^T(m)    | waits                       | waits, dQ to smem
//
// dQ of a step is 64 x 192: each warpgroup computes half of the columns. There is room for dS of one step. Warpgroup 1
// is half a step behind: when it has dS(m), that of warpgroup 0 has been in shared memory for half a step. So
// warpgroup 1 stores dS(m) and computes dQ(m) at once, and warpgroup 0 computes it half a step later, in its step
// m + 1, before it stores dS(m + 1). Each thus waits only for what the other did about half a step before.
#pragma once

#include <cute/tensor.hpp>

#include "core/layout.cuh"
#include "core/mask.cuh"
#include "core/registers.cuh"
#include "dq.cuh"
#include "mainloop.cuh"
#include "mla_traits.cuh"
#include "sm90/backward/common/modified_scores.cuh"
#include "sm90/backward/common/place.cuh"
#include "sm90/backward/common/scores.cuh"
#include "task.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

// The thread's keys and rows in a tile of transposed scores: `key` and `key` + 8, and `row`, `row` + 1 of every 8.
// Computed with unsigned shifts from the thread's index at each use, which leaves its registers to the accumulators.
template <int kWarpgroup>
struct FirstScore {
  int key;
  int row;

  CUTE_DEVICE FirstScore() {
    unsigned const thread = fresh_thread_index();
    key = kWarpgroup * 64 + (thread >> 5 & 3) * 16 + (thread >> 2 & 7);
    row = (thread & 3) * 2;
  }
};

// Sets the scores of a tile that the band hides to -inf.
template <int kWarpgroup, class Scores>
CUTE_DEVICE void apply_step_mask(Scores& scores,  // (keys, rows)
                                 StepMask const volatile& mask, int columns) {
  FirstScore<kWarpgroup> const first;
  int const key = first.key - mask.offset - first.row;
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    int const begin = key + 8 * i - mask.upper;
    keep_range<8>(scores(i, _), begin, first.key + 8 * i < columns ? key + 8 * i - mask.lower + 1 : begin);
  }
}

// Statistics of this thread's rows, four at a time: there are no registers for all. Of a tile each statistic has
// kRows / 16 lines of four; those of delta follow all stages of lse_log2.
struct StatReader {
  float4 const* fours;

  CUTE_DEVICE explicit StatReader(float const* stat)
      : fours(reinterpret_cast<float4 const*>(stat) + (unsigned(fresh_lane_index()) & 3)) {}
  CUTE_DEVICE float4 operator()(int i) const { return fours[4 * i]; }
};

// P^T, times 1 / kSumsFactor, in float16, from S^T. A word has a key's scores at two neighbouring rows.
template <class Traits, class Scores, class Words>
CUTE_DEVICE void exponentiate_to_half(Scores const& tSrS,  // (MMA, MMA_N, MMA_M)
                                      StatReader const& stats, float scale_log2,
                                      Words& rP) {  // (words)
  constexpr int kFours = decltype(size(rP))::value / 4;
  static_assert(decltype(size(tSrS))::value == 8 * kFours);
  CUTE_UNROLL
  for (int f = 0; f < kFours; ++f) {
    float4 const lse = stats(f);
    float const offset[4] = {Traits::kSumsExponent - lse.x, Traits::kSumsExponent - lse.y,
                             Traits::kSumsExponent - lse.z, Traits::kSumsExponent - lse.w};
    CUTE_UNROLL
    for (int i = 4 * f; i < 4 * f + 4; ++i) {  // the words of two keys at two rows, then at the next two
      int const row = i % 4 / 2 * 2;
      float const left = exp2_approx(fmaf(tSrS(2 * i), scale_log2, offset[row]));
      float const right = exp2_approx(fmaf(tSrS(2 * i + 1), scale_log2, offset[row + 1]));
      rP(i) = pack<cutlass::half_t>(left, right);
    }
  }
}

// P^T and dS^T = P^T (dP^T - delta) in the type of the products, both times 1 / kSumsFactor.
template <class Words, class Scores, class Rounded>
CUTE_DEVICE void round_p_and_ds(Words const& half_p,   // (words)
                                Scores const& tSrdP,  // (MMA, MMA_N, MMA_M)
                                StatReader const& stats, int delta,
                                Rounded& rP,     // (MMA, MMA_N, MMA_M)
                                Rounded& rdS) {  // (MMA, MMA_N, MMA_M)
  using Element = typename Rounded::value_type;
  auto p = recast<uint32_t>(rP), ds = recast<uint32_t>(rdS);  // (MMA / 2, MMA_N, MMA_M)
  constexpr int kFours = decltype(size(p))::value / 4;
  CUTE_UNROLL
  for (int f = 0; f < kFours; ++f) {
    float4 const four = stats(delta + f);
    CUTE_UNROLL
    for (int i = 4 * f; i < 4 * f + 4; ++i) {
      float const delta_left = i % 4 < 2 ? four.x : four.z, delta_right = i % 4 < 2 ? four.y : four.w;
      float2 const both = unpack<cutlass::half_t>(half_p(i));
      p(i) = pack<Element>(both.x, both.y);
      ds(i) = pack<Element>(both.x * (tSrdP(2 * i) - delta_left), both.y * (tSrdP(2 * i + 1) - delta_right));
    }
  }
}

// ds_address, in fewer instructions and registers.
template <int kWarpgroup, class Element>
CUTE_DEVICE uint32_t mla_ds_address(Element const* ds) {
  unsigned const thread = fresh_thread_index();
  unsigned const key = kWarpgroup * 64 + (thread >> 5 & 3) * 16 + (thread & 15);
  return cast_smem_ptr_to_uint(ds) + key * 128 + (((thread >> 4 & 1) ^ (key & 7)) << 4);
}

// dP^T = V dO^T.
template <class Traits, class FragV, class FragDo, class Scores>
CUTE_DEVICE void issue_mla_dp(typename Traits::SharedStorage& smem, SmemOperands<Traits> const& operands,
                              int warpgroup, PipelineState<2> rows,
                              FragV const& tSrV,    // (MMA, MMA_N, MMA_DV)
                              FragDo const& tSrdO,  // (MMA, MMA_M, MMA_DV, stage)
                              Scores& tSrdP) {      // (MMA, MMA_N, MMA_M)
  constexpr uint32_t kBytes = sizeof(typename Traits::Element) * typename Traits::SmemLayoutV{}.layout_b()(64, 0);
  typename Traits::MmaScores mma;
  smem.dout_pipeline.wait_full(rows);                                      // TMA: dO and delta have landed
  auto tSrV_now = operands.at(tSrV, smem.v, warpgroup * kBytes);           // (MMA, MMA_N, MMA_DV)
  auto tSrdO_now = operands.at(tSrdO, smem.dout[0])(_, _, _, rows.stage);  // (MMA, MMA_M, MMA_DV)
  issue_gemm<Accumulate::kOverwrite>(mma, tSrV_now, tSrdO_now, tSrdP);
}

// The stage and phase of dS.
CUTE_DEVICE PipelineState<1> ds_state(int step) { return {0, step & 1}; }

// Accumulates P^T dO in tdVrdV and dS^T Q in tdKrdK, for the keys of warpgroup kWarpgroup.
//
// A long function: its parts, the lambdas, work on the same dozen of tensors and pipeline states, which functions would
// all take as arguments. `step` is a row tile; the loop over them is at the end.
template <class Traits, int kWarpgroup, class AccumulatorK, class AccumulatorV>
CUTE_DEVICE void mla_mainloop(KernelArgs const& args, KeyTile const& tile, int task_number,
                              typename Traits::SharedStorage& smem,
                              AccumulatorK& tdKrdK,    // (MMA, MMA_N, MMA_D)
                              AccumulatorV& tdVrdV) {  // (MMA, MMA_N, MMA_DV)
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  constexpr bool kLater = kWarpgroup == 0;  // dQ of a step is computed in the next one

  // The operands in shared memory.
  auto sQ = make_tensor(make_smem_ptr(smem.q[0]), typename Traits::SmemLayoutQ{});         // (BLK_M, D, stage)
  auto sQt = make_tensor(make_smem_ptr(smem.q[0]), typename Traits::SmemLayoutQt{});       // (D, BLK_M, stage)
  auto sdO = make_tensor(make_smem_ptr(smem.dout[0]), typename Traits::SmemLayoutDo{});    // (BLK_M, DV, stage)
  auto sdOt = make_tensor(make_smem_ptr(smem.dout[0]), typename Traits::SmemLayoutDoT{});  // (DV, BLK_M, stage)
  auto sK = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemLayoutK{});            // (BLK_N, D)
  auto sV = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemLayoutV{});            // (BLK_N, DV)
  auto sdS = make_tensor(make_smem_ptr(smem.ds[0]), typename Traits::SmemLayoutS{});       // (BLK_M, BLK_N)

  // Their descriptors, of which the phases recompute the addresses.
  typename Traits::MmaScores mma_scores;
  typename Traits::MmaDk mma_dk;
  typename Traits::MmaDv mma_dv;
  auto const warpgroup_scores = mma_scores.get_slice(128 * kWarpgroup);
  auto tSrK = warpgroup_scores.partition_fragment_A(sK);                         // (MMA, MMA_N, MMA_D)
  auto tSrV = warpgroup_scores.partition_fragment_A(sV);                         // (MMA, MMA_N, MMA_DV)
  auto tSrQ = warpgroup_scores.partition_fragment_B(sQ);                         // (MMA, MMA_M, MMA_D, stage)
  auto tSrdO = warpgroup_scores.partition_fragment_B(sdO);                       // (MMA, MMA_M, MMA_DV, stage)
  auto tdVrdO = mma_dv.get_slice(128 * kWarpgroup).partition_fragment_B(sdOt);   // (MMA, MMA_DV, MMA_K, stage)
  auto tdKrQ = mma_dk.get_slice(128 * kWarpgroup).partition_fragment_B(sQt);     // (MMA, MMA_D, MMA_K, stage)
  SmemOperands<Traits> const operands(smem);

  int number = tile.begin;  // of the step
  bool dq_pending = false;  // dQ is in shared memory, not yet published
  // Publishes what the step before has stored of dQ and, by warpgroup 0, its dS.
  auto publish = [&]() __attribute__((always_inline)) {
    tma_store_fence();  // the async proxy reads them: dS through WGMMA, dQ through bulk copies
    if (kLater) smem.ds_pipeline.arrive_full(ds_state(number - 1));
    if (dq_pending) publish_dq<Traits>(smem, kWarpgroup, number - 1 - kLater);
    dq_pending = false;
  };
  auto put_ds = [&](auto const& rdS) __attribute__((always_inline)) {
    smem.ds_pipeline.wait_empty(ds_state(number));  // both warpgroups have computed dQ of the step before
    store_ds<Traits, Share{}>(mla_ds_address<kWarpgroup>(smem.ds[0]), rdS);
  };
  // The warpgroup's columns of dQ from kFirst on, as many as tdQrdQ has.
  auto issue_dq_columns = [&]<int kFirst, class Dq>(C<kFirst>, int step, Dq& tdQrdQ) __attribute__((always_inline)) {
    constexpr int kColumns = decltype(size(tdQrdQ))::value * 2;
    constexpr uint32_t kBytes = sizeof(Element) * (kWarpgroup * Traits::kDqColumns + kFirst) * kBlockN;
    typename Traits::template MmaQueries<kColumns> mma;
    auto sKt = make_tensor(make_smem_ptr(smem.k), typename Traits::template SmemLayoutKt<kColumns>{});
    auto tdQrdS = mma.get_slice(0).partition_fragment_A(sdS);          // (MMA, MMA_M, MMA_K)
    auto tdQrK = mma.get_slice(0).partition_fragment_B(sKt);           // (MMA, MMA_D, MMA_K)
    smem.ds_pipeline.wait_full(ds_state(step));                        // all consumer warps have stored dS of the step
    auto tdQrdS_now = operands.at(tdQrdS, smem.ds[0]);                 // (MMA, MMA_M, MMA_K)
    auto tdQrK_now = operands.at(tdQrK, smem.k, kBytes);               // (MMA, MMA_D, MMA_K)
    issue_gemm<Accumulate::kOverwrite>(mma, tdQrdS_now, tdQrK_now, tdQrdQ);
  };
  constexpr int kDqColumns = Traits::kDqColumns, kFirstColumns = kLater ? Traits::kDqColumnsAtOnce : kDqColumns;
  auto make_dq = [&]<int kColumns>(C<kColumns>) __attribute__((always_inline)) {
    typename Traits::template MmaQueries<kColumns> mma;
    return partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kColumns>>{});  // (MMA, MMA_M, MMA_D)
  };
  // Waits for the first columns, which have been issued, computes the others, and stores all. `between`: called before
  // the last store, once dS of the step may be overwritten.
  auto finish_dq_columns = [&](int step, auto& tdQrdQ, auto const& between) __attribute__((always_inline)) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(tdQrdQ);
    if constexpr (kFirstColumns < kDqColumns) {
      store_dq<Traits>(smem, kWarpgroup, step, tdQrdQ);
      auto tdQrdQ_rest = make_dq(C<kDqColumns - kFirstColumns>{});  // (MMA, MMA_M, MMA_D)
      issue_dq_columns(C<kFirstColumns>{}, step, tdQrdQ_rest);
      warpgroup_wait<0>();
      warpgroup_fence_operand(tdQrdQ_rest);
      smem.ds_pipeline.release(ds_state(step));
      between();
      store_dq<Traits, kFirstColumns / 2>(smem, kWarpgroup, step, tdQrdQ_rest);
    } else {
      smem.ds_pipeline.release(ds_state(step));
      between();
      store_dq<Traits>(smem, kWarpgroup, step, tdQrdQ);
    }
    dq_pending = true;
  };

  auto step = [&](auto kind) __attribute__((always_inline)) {
    constexpr bool kFirst = kind == StepKind::kFirst;
    PipelineState<2> const rows = at_step(number);
    auto tSrS = partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kBlockM>>{});   // (MMA, MMA_N, MMA_M)
    auto tSrdP = partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kBlockM>>{});  // (MMA, MMA_N, MMA_M)
    auto rP = make_tensor_like<Element>(tSrS);                                           // (MMA, MMA_N, MMA_M)
    auto rdS = make_tensor_like<Element>(tSrS);                                          // (MMA, MMA_N, MMA_M)
    auto tdVrP = make_tensor(rP.data(), operand_a_layout_64(rP.layout()));               // (MMA, MMA_N, MMA_K)
    auto tdKrdS = make_tensor(rdS.data(), operand_a_layout_64(rdS.layout()));            // (MMA, MMA_N, MMA_K)
    auto tdQrdQ = make_dq(C<kFirstColumns>{});                                           // (MMA, MMA_M, MMA_D)
    auto scores = rowcol_view(tSrS);                                                     // (keys, rows)

    if (kFirst && kWarpgroup == 1) named_sync(kHalfStep, Traits::kConsumerThreads);  // warpgroup 0 has issued its dV
    issue_scores<Traits>(smem, operands, kWarpgroup, rows, tSrK, tSrQ, tSrS);
    if (!kFirst) publish();  // here, where the fence has no store in flight to wait for
    int const columns = smem.masks[rows.stage].columns;
    warpgroup_wait<0>();  // S^T
    warpgroup_fence_operand(tSrS);
    if (columns >= 0) apply_step_mask<kWarpgroup>(scores, smem.masks[rows.stage], columns);
    StatReader const stats(smem.lse_log2[rows.stage]);
    auto half_p = make_tensor<uint32_t>(Int<decltype(size(tSrS))::value / 2>{});  // (words)
    exponentiate_to_half<Traits>(tSrS, stats, args.params.scale_log2, half_p);
    warpgroup_fence_operand(half_p);  // S^T's registers are free for dP^T
    issue_mla_dp<Traits>(smem, operands, kWarpgroup, rows, tSrV, tSrdO, tSrdP);
    warpgroup_wait<0>();  // dP^T
    warpgroup_fence_operand(tSrdP);
    constexpr int kDelta = (Traits::kStages * kBlockM) / 16;  // from the lines of lse_log2 to those of delta
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1427  // offsetof of a type with constructors
    static_assert(offsetof(typename Traits::SharedStorage, delta) ==
                  offsetof(typename Traits::SharedStorage, lse_log2) + sizeof(smem.lse_log2));
#pragma nv_diagnostic pop
    round_p_and_ds(half_p, tSrdP, stats, kDelta, rP, rdS);
    issue_gemm<Accumulate::kAdd>(mma_dv, tdVrP, operands.at(tdVrdO, smem.dout[0])(_, _, _, rows.stage), tdVrdV);
    if (kFirst && kWarpgroup == 0) named_arrive(kHalfStep, Traits::kConsumerThreads);
    if (!kLater) put_ds(rdS);
    issue_gemm<Accumulate::kAdd>(mma_dk, tdKrdS, operands.at(tdKrQ, smem.q[0])(_, _, _, rows.stage), tdKrdK);
    if (!kLater) {
      tma_store_fence();  // of dS
      smem.ds_pipeline.arrive_full(ds_state(number));
    }
    warpgroup_wait<1>();  // dV
    warpgroup_fence_operand(tdVrdV);
    smem.dout_pipeline.release(rows);
    constexpr bool kDq = !kFirst || !kLater;
    int const of_dq = number - kLater;
    warpgroup_wait<0>();  // dK; in flight together with dQ, it would have all products serialised (C7512)
    warpgroup_fence_operand(tdKrdK);
    smem.q_pipeline.release(rows);
    if constexpr (kDq) issue_dq_columns(C<0>{}, of_dq, tdQrdQ);
    if (kFirst) wait_results_read();
    auto const put_later = [&]() __attribute__((always_inline)) {
      if (kLater) put_ds(rdS);
    };
    if constexpr (kDq) {
      finish_dq_columns(of_dq, tdQrdQ, put_later);
    } else {
      put_later();
    }
    ++number;
  };

  smem.k_pipeline.wait_full({0, tile.keys_phase});  // TMA: K and V of the key tile have landed
  smem.v_pipeline.wait_full({0, tile.keys_phase});
  int left = tile.end - tile.begin - 1;
  step(C<StepKind::kFirst>{});
#pragma unroll 1
  for (; left > 0; --left) step(C<StepKind::kWithDq>{});
  int const keys_phase = uniform(static_cast<KeyTile const volatile&>(smem.task[opaque(task_number) & 1]).keys_phase);
  smem.v_pipeline.release({0, keys_phase});
  publish();
  if constexpr (kLater) {
    auto tdQrdQ = make_dq(C<kFirstColumns>{});  // (MMA, MMA_M, MMA_D)
    issue_dq_columns(C<0>{}, number - 1, tdQrdQ);
    finish_dq_columns(number - 1, tdQrdQ, [] {});
    tma_store_fence();
    publish_dq<Traits>(smem, kWarpgroup, number - 1);
  }
  smem.k_pipeline.release({0, keys_phase});
}

}  // namespace flash_cute::sm90::backward::dq_in_memory
