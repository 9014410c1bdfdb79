// The loop over row tiles where sequences are read at run time: the steps of mainloop.cuh, with what belongs to the
// task read from shared memory at each use.
#pragma once

#include <cute/tensor.hpp>

#include "../../core/convert.cuh"
#include "../../core/layout.cuh"
#include "products.cuh"
#include "sequence_dq.cuh"
#include "sequence_load.cuh"
#include "sequence_scores.cuh"
#include "sequence_traits.cuh"
#include "step.cuh"

namespace flash_cute::sm80::bwd {

// P^T and dS^T of a part of a row tile, in float32.
template <class Schedule, class Accumulator>
CUTE_DEVICE void compute_scores(BwdParams const& params, typename Schedule::Traits::SharedStorage& smem,
                                RowTile const& now, int q_stage, int part,
                                Accumulator& tSrS,     // (MMA, MMA_N, MMA_M)
                                Accumulator& tSrdP) {  // (MMA, MMA_N, MMA_M)
  constexpr int kParts = Schedule::Traits::kParts;
  scores_product<Schedule>(smem.sK(), smem.sQ()(_, _, q_stage * kParts + part), tSrS);
  scores_product<Schedule>(smem.sV(), smem.sdO()(_, _, part), tSrdP);
  subtract(tSrdP, row_stats<typename Schedule::Traits>(smem.task, smem.delta[0], part));
  modify_and_mask<Schedule>(params, smem.task, now, part, tSrS, tSrdP);
  auto const lse_log2 = row_stats<typename Schedule::Traits>(smem.task, smem.lse_log2[q_stage], part);
  exponentiate_and_multiply(tSrS, tSrdP, lse_log2, params.scale_log2);
}

// Leaves P^T dO in tdVrdV and dS^T Q in tdKrdK.
template <class Traits, class Accumulator>
CUTE_DEVICE void sequence_mainloop(BwdParams const& params, typename Traits::SharedStorage& smem,
                                   Accumulator& tdKrdK,    // (MMA, MMA_N, MMA_D)
                                   Accumulator& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  using Element = typename Traits::Element;
  using Schedule = SequenceSchedule<Traits>;
  constexpr bool kTwoQ = Schedule::kTwoQ;
  constexpr int kSteps = kTwoQ ? Traits::kBlockM / 16 : 1;  // k steps of dK between which dQ is added
  SequenceTask const& task = smem.task;
  RowTile now = task.first(params);
  // Row tiles that come later are found when they are loaded: kept across the GEMMs, they spilled.
  auto const load_next = [&](auto&& load) {
    RowTile const next = task.next({opaque(now.head), opaque(now.m_block)});
    if (task.contains(params, next)) load(next);
  };

  load_keys<Schedule>(params, task, params.k, params.k_strides, smem.sK());
  load_q<Schedule>(params, now, smem, 0);
  load_keys<Schedule>(params, task, params.v, params.v_strides, smem.sV());
  load_dout<Schedule>(params, now, smem);
  cp_async_fence();

#pragma unroll 1
  for (int stage = 0; task.contains(params, now); stage ^= int(kTwoQ), now = task.next(now)) {
    cp_async_wait<0>();  // this thread's copies of Q and dO have landed
    __syncthreads();     // those of all threads have; and all have finished the step before, so its buffers are free
    if (params.deterministic && fresh_thread_index() == kEndingThread) end_turn_before(params, task, now);
    if (kTwoQ) load_next([&](RowTile const& next) { load_q<Schedule>(params, next, smem, stage ^ 1); });

    auto tSrS = scores_accumulator<Traits>();   // (MMA, MMA_N, MMA_M)
    auto tSrdP = scores_accumulator<Traits>();  // (MMA, MMA_N, MMA_M)
    auto rP = make_tensor_like<Element>(tSrS);    // (MMA, MMA_N, MMA_M)
    auto rdS = make_tensor_like<Element>(tSrdP);  // (MMA, MMA_N, MMA_M)
    CUTE_UNROLL
    for (int part = 0; part < Traits::kParts; ++part) {
      compute_scores<Schedule>(params, smem, now, stage, part, tSrS, tSrdP);
      convert(tSrS, rP);
      convert(tSrdP, rdS);
      store_scores<Schedule>(rdS, smem.sdSt(), part);
      if constexpr (Traits::kPInRegs) {
        auto tdVrP = make_tensor(rP.data(), operand_a_layout(rP.layout()));     // (MMA, MMA_N, MMA_K)
        auto tdKrdS = make_tensor(rdS.data(), operand_a_layout(rdS.layout()));  // (MMA, MMA_N, MMA_K)
        keys_product_rs<Schedule>(tdVrP, smem.sdOt()(_, _, part), tdVrdV, [](int) {});
        keys_product_rs<Schedule>(tdKrdS, smem.sQt()(_, _, part), tdKrdK, [](int) {});
      } else {
        store_scores<Schedule>(rP, smem.sPt(), part);
      }
    }
    if (params.deterministic && fresh_thread_index() == kWaitingThread) wait_turn<Traits>(params, task, now);
    __syncthreads();  // all threads have stored dS, and P or have finished reading Q and dO

    if constexpr (!Traits::kPInRegs) {
      keys_product_ss<Schedule>(smem.sPt(), smem.sdOt()(_, _, _0{}), tdVrdV, [](int) {});
      if constexpr (!kTwoQ) keys_product_ss<Schedule>(smem.sdSt(), smem.sQt()(_, _, _0{}), tdKrdK, [](int) {});
      __syncthreads();  // all threads have finished reading dO, and with one stage Q: the only buffers are free
    }
    load_next([&](RowTile const& next) {
      if (!kTwoQ) load_q<Schedule>(params, next, smem, 0);
      load_dout<Schedule>(params, next, smem);
    });
    cp_async_fence();
    auto const tdQrdQ = queries_product<Schedule>(smem.sdS(), smem.sKt());  // (MMA, MMA_M, MMA_D)
    float* const sums = dq_sums<Traits>(params, task, now);
    end_basic_block(params);
    if constexpr (kTwoQ) {
      keys_product_ss<Schedule>(smem.sdSt(), smem.sQt()(_, _, stage), tdKrdK,
                                [&](int k) { add_dq<Traits, kSteps>(sums, k, tdQrdQ); });
    } else {
      add_dq<Traits, kSteps>(sums, 0, tdQrdQ);
    }
    end_basic_block(params);
  }
  cp_async_wait<0>();
  if (params.deterministic) {
    __syncthreads();  // all threads have added dQ of the last step
    if (fresh_thread_index() == kEndingThread) end_turn_before(params, task, now);
  }
}

}  // namespace flash_cute::sm80::bwd
