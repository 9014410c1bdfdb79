// The loop over row tiles where sequences are read at run time: the steps of mainloop.cuh, with what belongs to the
// task read from shared memory at each use.
#pragma once

#include <cute/tensor.hpp>

#include "products.cuh"
#include "sequence_dq.cuh"
#include "sequence_load.cuh"
#include "sequence_step.cuh"
#include "sequence_traits.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

// Leaves P^T dO in tdVrdV and dS^T Q in tdKrdK.
template <class Traits, class Accumulator>
CUTE_DEVICE void sequence_mainloop(BwdParams const& params, typename Traits::SharedStorage& smem,
                                   Accumulator& tdKrdK,    // (MMA, MMA_N, MMA_D)
                                   Accumulator& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  using Schedule = SequenceSchedule<Traits>;
  constexpr bool kTwoQ = Schedule::kTwoQ, kTwoDout = Schedule::kTwoDout;
  constexpr int kSteps = kTwoQ ? Traits::kBlockM / 16 : 1;  // k steps of dK between which dQ is added
  typename Traits::Task const& task = smem.task;
  RowTile now = task.first(params);
  // Row tiles that come later are found when they are loaded: kept across the GEMMs, they spilled.
  auto const load_next = [&](auto&& load) {
    RowTile const next = task.next({opaque(now.head), opaque(now.m_block)});
    if (task.contains(params, next)) load(next);
  };

  load_keys<Schedule>(params, task, params.k, params.k_strides, smem.sK());
  load_q<Schedule>(params, now, smem, 0);
  load_keys<Schedule>(params, task, params.v, params.v_strides, smem.sV());
  load_dout<Schedule>(params, now, smem, 0);
  load_stats<Schedule>(params, now, smem);
  cp_async_fence();

#pragma unroll 1
  for (int stage = 0; task.contains(params, now); stage ^= int(kTwoQ), now = task.next(now)) {
    int const q_stage = kTwoQ ? stage : 0, dout_stage = kTwoDout ? stage : 0;
    cp_async_wait<0>();  // this thread's copies of Q and dO have landed
    __syncthreads();     // those of all threads have; and all have finished the step before, so its buffers are free
    if (params.deterministic && fresh_thread_index() == kEndingThread) end_turn_before(params, task, now);
    if constexpr (kTwoQ) {
      load_next([&](RowTile const& next) {
        load_q<Schedule>(params, next, smem, stage ^ 1);
        if (kTwoDout) load_dout<Schedule>(params, next, smem, stage ^ 1);
      });
    }

    if constexpr (Traits::kPInRegs) {
      CUTE_UNROLL
      for (int part = 0; part < Traits::kParts; ++part) {
        part_phase<Schedule>(params, smem, now, part, tdKrdK, tdVrdV);
      }
    } else {
      scores_phase<Schedule>(params, smem, now, q_stage, dout_stage);
    }
    if (params.deterministic && fresh_thread_index() == kWaitingThread) wait_turn<Traits>(params, task, now);
    __syncthreads();  // all threads have stored dS and read the row statistics, and stored P or finished with Q and dO

    if constexpr (!Traits::kPInRegs) {
      keys_product_ss<Schedule>(smem.sPt(), smem.sdOt()(_, _, dout_stage), tdVrdV, [](int) {});
      if constexpr (!kTwoQ) keys_product_ss<Schedule>(smem.sdSt(), smem.sQt()(_, _, 0), tdKrdK, [](int) {});
      if constexpr (!kTwoDout) __syncthreads();  // all threads have finished reading the only dO, and an only Q
    }
    load_next([&](RowTile const& next) {
      if (!kTwoQ) load_q<Schedule>(params, next, smem, 0);
      if (!kTwoDout) load_dout<Schedule>(params, next, smem, 0);
      load_stats<Schedule>(params, next, smem);
    });
    cp_async_fence();
    auto const tdQrdQ = queries_product<Schedule>(smem.sdS(), smem.sKt());  // (MMA, MMA_M, MMA_D)
    float* const sums = dq_sums<Traits>(params, task, now);
    end_basic_block(params);
    if constexpr (kTwoQ) {
      keys_product_ss<Schedule>(smem.sdSt(), smem.sQt()(_, _, q_stage), tdKrdK,
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

}  // namespace flash_cute::sm80::backward::dq_in_memory
