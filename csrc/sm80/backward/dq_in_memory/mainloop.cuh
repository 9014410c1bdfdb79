// The loop over row tiles: S^T = K Q^T, P^T, dP^T = V dO^T, dS^T, dV += P^T dO, dK += dS^T Q, dQ = dS K.
//
// There are two schedules, by where P is kept:
//   registers: a warp owns 32 keys and all rows. For each part of 32 rows it computes scores, dV and dK without a
//              barrier; only dS goes through shared memory, for dQ.
//   shared memory: P and dS of the whole step are stored, then each warp computes its share of dV, dK and dQ.
//
// How a function is inlined decides which values the compiler keeps in registers: CUTE_DEVICE functions (forced) before
// it optimises, `__device__ inline` functions after it has optimised each of them, see docs/sm80_backward.md.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "core/registers.cuh"
#include "dq.cuh"
#include "load.cuh"
#include "products.cuh"
#include "schedule.cuh"
#include "scores.cuh"
#include "step.cuh"
#include "task.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

// Leaves P^T dO in tdVrdV and dS^T Q in tdKrdK.
template <class Traits, bool kDeterministic, class Accumulator>
CUTE_DEVICE void mainloop(BwdParams const& params, typename Traits::SharedStorage& smem,
                          Accumulator& tdKrdK,    // (MMA, MMA_N, MMA_D)
                          Accumulator& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  using Element = typename Traits::Element;
  using Schedule = dq_in_memory::Schedule<Traits, kDeterministic>;
  constexpr bool kTwoQ = Schedule::kTwoQ, kTwoDout = Schedule::kTwoDout;
  Task<Schedule> const task(params, draw_index<kDeterministic>(params, reinterpret_cast<int*>(smem.ds)));
  if (task.empty()) return;
  KeyTile const& tile = task.tile;
  RowTile now{tile.head_kv * params.heads_per_kv, task.first()};
  int const end_head = now.head + params.heads_per_kv;

  load_key_tile<Schedule>(params, tile, params.k, params.k_strides, smem.sK());
  load_q<Schedule>(params, tile.batch, now, smem, 0);
  load_key_tile<Schedule>(params, tile, params.v, params.v_strides, smem.sV());
  load_dout<Schedule>(params, tile.batch, now, smem, 0);
  cp_async_fence();

  for (int stage = 0; now.head < end_head; stage ^= 1) {
    int const q_stage = kTwoQ ? stage : 0, dout_stage = kTwoDout ? stage : 0;
    RowTile const next = task.next(now);
    bool const more = next.head < end_head;
    cp_async_wait<0>();  // this thread's copies of Q and dO have landed
    __syncthreads();     // those of all threads have; and all have finished the step before, so its buffers are free
    int ended = 0;       // how many key tiles have added to this row tile, where that is read here
    if constexpr (kDeterministic) {
      if (fresh_thread_index() == kEndingThread) end_turn_before(task, now);
      if (Schedule::kReadsSemaphoreEarly && fresh_thread_index() == kWaitingThread) {
        ended = turns_ended(semaphore(task, now));
      }
    }
    if constexpr (Schedule::kEndsBlockBeforeLoads) end_basic_block<Schedule>(params);
    if (kTwoQ && more) load_q<Schedule>(params, tile.batch, next, smem, stage ^ 1);
    if (kTwoDout && more) load_dout<Schedule>(params, tile.batch, next, smem, stage ^ 1);

    if constexpr (Traits::kPInRegs) {
      CUTE_UNROLL
      for (int part = 0; part < Traits::kParts; ++part) {
        // Not a function: inlined from one, head dim 64 compiled to 16 to 24 more instructions (deterministic, sm_90).
        int const q_tile = q_stage * Traits::kParts + part, dout_tile = dout_stage * Traits::kParts + part;
        auto tSrS = scores_accumulator<Traits>();  // (MMA, MMA_N, MMA_M)
        scores_product<Schedule>(smem.sK(), smem.sQ()(_, _, q_tile), tSrS);
        RowStats<Schedule> const lse_log2(smem.lse_log2[q_stage], part);
        mask_scores(task, now.m_block, part, tSrS);
        exponentiate(tSrS, lse_log2, params.scale_log2);
        auto rP = make_tensor_like<Element>(tSrS);  // (MMA, MMA_N, MMA_M)
        convert(tSrS, rP);
        auto tdVrP = make_tensor(rP.data(), operand_a_layout(rP.layout()));  // (MMA, MMA_N, MMA_K)
        if constexpr (!Schedule::kRoundsPOfDs) {
          keys_product_rs<Schedule>(tdVrP, smem.sdOt()(_, _, dout_tile), tdVrdV, [](int) {});
        }
        auto tSrdP = scores_accumulator<Traits>();  // (MMA, MMA_N, MMA_M)
        scores_product<Schedule>(smem.sV(), smem.sdO()(_, _, dout_tile), tSrdP);
        if constexpr (Schedule::kRoundsPOfDs) {
          keys_product_rs<Schedule>(tdVrP, smem.sdOt()(_, _, dout_tile), tdVrdV, [](int) {});
        }
        RowStats<Schedule> const delta(smem.delta[dout_stage], part);
        if constexpr (Schedule::kRoundsPOfDs) {
          differentiate(tSrdP, rP, delta);
        } else {
          differentiate(tSrdP, tSrS, delta);
        }
        auto rdS = make_tensor_like<Element>(tSrdP);  // (MMA, MMA_N, MMA_M)
        convert(tSrdP, rdS);
        store_scores<Schedule>(rdS, smem.sdSt(), part);
        auto tdKrdS = make_tensor(rdS.data(), operand_a_layout(rdS.layout()));  // (MMA, MMA_N, MMA_K)
        keys_product_rs<Schedule>(tdKrdS, smem.sQt()(_, _, q_tile), tdKrdK, [](int) {});
      }
      if (kDeterministic && fresh_thread_index() == kWaitingThread) wait_turn(task, now, ended);
      __syncthreads();  // all threads have stored dS, and have finished reading Q and dO
      if (!kTwoQ && more) load_q<Schedule>(params, tile.batch, next, smem, 0);
      if (!kTwoDout && more) load_dout<Schedule>(params, tile.batch, next, smem, 0);
      cp_async_fence();
      dq_phase(params, task, smem, now);
    } else {
      scores_phase(params, task, smem, now, q_stage, dout_stage);
      if (kDeterministic && fresh_thread_index() == kWaitingThread) wait_turn(task, now, ended);
      if constexpr (Schedule::kEndsBlockBeforeBarrier) end_basic_block<Schedule>(params);
      __syncthreads();  // all threads have stored P and dS
      keys_product_ss<Schedule>(smem.sPt(), smem.sdOt()(_, _, dout_stage), tdVrdV, [](int) {});
      if constexpr (kTwoQ) {
        if constexpr (!kTwoDout) {
          __syncthreads();  // all threads have finished reading dO: its only buffer is free
          if (more) load_dout<Schedule>(params, tile.batch, next, smem, 0);
        }
        cp_async_fence();
        dq_and_dk_phase(params, task, smem, now, q_stage, tdKrdK);
      } else {
        static_assert(!kTwoDout);
        keys_product_ss<Schedule>(smem.sdSt(), smem.sQt()(_, _, q_stage), tdKrdK, [](int) {});
        __syncthreads();  // all threads have finished reading Q and dO: their only buffers are free
        // Recomputed: kept across the GEMMs, it spilled.
        RowTile const next_again = task.next({opaque(now.head), opaque(now.m_block)});
        if (more) load_q<Schedule>(params, tile.batch, next_again, smem, 0);
        if (more) load_dout<Schedule>(params, tile.batch, next_again, smem, 0);
        cp_async_fence();
        dq_phase(params, task, smem, now);
      }
    }
    now = next;
  }
  cp_async_wait<0>();
  if constexpr (kDeterministic) {
    __syncthreads();  // all threads have added dQ of the last step
    if (fresh_thread_index() == kEndingThread) end_turn_before(task, now);
  }
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
