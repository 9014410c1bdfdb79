// The phases of a step of the loop over row tiles, see mainloop.cuh.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/registers.cuh"
#include "dq.cuh"
#include "products.cuh"
#include "schedule.cuh"
#include "scores.cuh"
#include "task.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

template <class Traits>
CUTE_DEVICE auto scores_accumulator() {  // (MMA, MMA_N, MMA_M)
  return partition_fragment_C(typename Traits::MmaScores{}, Shape<Int<Traits::kBlockN>, Int<Traits::kScoreRows>>{});
}

// With P in shared memory: computes the scores, and stores P^T and dS^T of the whole row tile.
template <class Schedule>
CUTE_DEVICE void scores_phase(BwdParams const& params, Task<Schedule> const& task,
                              typename Schedule::Traits::SharedStorage& smem, RowTile const& now, int q_stage,
                              int dout_stage) {
  using Traits = typename Schedule::Traits;
  using Element = typename Traits::Element;
  static_assert(Traits::kParts == 1);
  constexpr int kPart = 0;
  auto tSrS = scores_accumulator<Traits>();   // (MMA, MMA_N, MMA_M)
  auto tSrdP = scores_accumulator<Traits>();  // (MMA, MMA_N, MMA_M)
  scores_product<Schedule>(smem.sK(), smem.sQ()(_, _, q_stage), tSrS);
  RowStats<Schedule> const lse_log2(smem.lse_log2[q_stage], kPart);
  RowStats<Schedule> const delta(smem.delta[dout_stage], kPart);
  scores_product<Schedule>(smem.sV(), smem.sdO()(_, _, dout_stage), tSrdP);
  mask_scores(task, now.m_block, kPart, tSrS);
  exponentiate(tSrS, lse_log2, params.scale_log2);
  differentiate(tSrdP, tSrS, delta);
  auto rP = make_tensor_like<Element>(tSrS);    // (MMA, MMA_N, MMA_M)
  auto rdS = make_tensor_like<Element>(tSrdP);  // (MMA, MMA_N, MMA_M)
  convert(tSrS, rP);
  convert(tSrdP, rdS);
  store_scores<Schedule>(rP, smem.sPt(), kPart);
  store_scores<Schedule>(rdS, smem.sdSt(), kPart);
}

// dQ = dS K, added to memory.
template <class Schedule>
__device__ inline void dq_phase(BwdParams const& params, Task<Schedule> const& task,
                                typename Schedule::Traits::SharedStorage& smem, RowTile const& now) {
  using Traits = typename Schedule::Traits;
  auto const tdQrdQ = queries_product<Schedule>(smem.sdS(), smem.sKt());  // (MMA, MMA_M, MMA_D)
  float* const sums = dq_sums<Traits>(params, now, opaque(task.tile.batch));
  end_basic_block<Schedule>(params);
  add_dq<Traits, 1>(sums, 0, tdQrdQ);
  if constexpr (Schedule::kEndsBlockAfterAdds) end_basic_block<Schedule>(params);
}

// dQ = dS K, then dK += dS^T Q, between whose MMAs dQ is added to memory.
template <class Schedule, class Accumulator>
CUTE_DEVICE void dq_and_dk_phase(BwdParams const& params, Task<Schedule> const& task,
                                 typename Schedule::Traits::SharedStorage& smem, RowTile const& now, int q_stage,
                                 Accumulator& tdKrdK) {  // (MMA, MMA_N, MMA_D)
  using Traits = typename Schedule::Traits;
  constexpr int kSteps = Traits::kBlockM / 16;                          // k steps of dK
  auto const tdQrdQ = queries_product<Schedule>(smem.sdS(), smem.sKt());  // (MMA, MMA_M, MMA_D)
  float* const sums = dq_sums<Traits>(params, now, opaque(task.tile.batch));
  end_basic_block<Schedule>(params);
  keys_product_ss<Schedule>(smem.sdSt(), smem.sQt()(_, _, q_stage), tdKrdK,
                          [&](int k) { add_dq<Traits, kSteps>(sums, k, tdQrdQ); });
  if constexpr (Schedule::kEndsBlockAfterAdds) end_basic_block<Schedule>(params);
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
