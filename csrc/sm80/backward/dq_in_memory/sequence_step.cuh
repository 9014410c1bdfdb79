// The first half of a step where sequences are read at run time: from the scores to P^T and dS^T, see step.cuh.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "products.cuh"
#include "sequence_scores.cuh"
#include "sequence_traits.cuh"
#include "step.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

// P^T and dS^T of a part of a row tile, in float32.
template <class Schedule, class Accumulator>
CUTE_DEVICE void compute_scores(BwdParams const& params, typename Schedule::Traits::SharedStorage& smem,
                                RowTile const& now, int q_tile, int dout_tile, int part,
                                Accumulator& tSrS,     // (MMA, MMA_N, MMA_M)
                                Accumulator& tSrdP) {  // (MMA, MMA_N, MMA_M)
  using Traits = typename Schedule::Traits;
  typename Traits::Task const& task = smem.task;
  scores_product<Schedule>(smem.sK(), smem.sQ()(_, _, q_tile), tSrS);
  scores_product<Schedule>(smem.sV(), smem.sdO()(_, _, dout_tile), tSrdP);
  if constexpr (Traits::kModifiesScores) {
    subtract(tSrdP, row_stats<Traits>(task, smem.delta[0], part));
    modify_scores<Schedule>(params, task, now, part, tSrS, tSrdP);
  }
  mask_scores<Schedule>(params, task, now, part, tSrS);
  exponentiate(tSrS, row_stats<Traits>(task, smem.lse_log2[0], part), params.scale_log2);
  if constexpr (Traits::kModifiesScores) {
    multiply(tSrdP, tSrS);
  } else {
    differentiate(tSrdP, tSrS, row_stats<Traits>(task, smem.delta[0], part));
  }
}

// With P in shared memory: stores P^T and dS^T of the whole row tile.
template <class Schedule>
CUTE_DEVICE void scores_phase(BwdParams const& params, typename Schedule::Traits::SharedStorage& smem,
                              RowTile const& now, int q_stage, int dout_stage) {
  using Traits = typename Schedule::Traits;
  using Element = typename Traits::Element;
  static_assert(Traits::kParts == 1);
  constexpr int kPart = 0;
  auto tSrS = scores_accumulator<Traits>();   // (MMA, MMA_N, MMA_M)
  auto tSrdP = scores_accumulator<Traits>();  // (MMA, MMA_N, MMA_M)
  compute_scores<Schedule>(params, smem, now, q_stage, dout_stage, kPart, tSrS, tSrdP);
  auto rP = make_tensor_like<Element>(tSrS);    // (MMA, MMA_N, MMA_M)
  auto rdS = make_tensor_like<Element>(tSrdP);  // (MMA, MMA_N, MMA_M)
  convert(tSrS, rP);
  convert(tSrdP, rdS);
  store_scores<Schedule>(rP, smem.sPt(), kPart);
  store_scores<Schedule>(rdS, smem.sdSt(), kPart);
}

// With P in registers: dV += P^T dO and dK += dS^T Q of a part of a row tile, whose dS^T it stores. Plain scores have
// the order of the dense kernel, in which S^T and dP^T need not be in registers together.
template <class Schedule, class Accumulator>
CUTE_DEVICE void part_phase(BwdParams const& params, typename Schedule::Traits::SharedStorage& smem,
                            RowTile const& now, int part,
                            Accumulator& tdKrdK,    // (MMA, MMA_N, MMA_D)
                            Accumulator& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  using Traits = typename Schedule::Traits;
  using Element = typename Traits::Element;
  typename Traits::Task const& task = smem.task;
  auto tSrS = scores_accumulator<Traits>();   // (MMA, MMA_N, MMA_M)
  auto tSrdP = scores_accumulator<Traits>();  // (MMA, MMA_N, MMA_M)
  auto rP = make_tensor_like<Element>(tSrS);  // (MMA, MMA_N, MMA_M)
  auto tdVrP = make_tensor(rP.data(), operand_a_layout(rP.layout()));  // (MMA, MMA_N, MMA_K)
  auto const add_dv = [&] { keys_product_rs<Schedule>(tdVrP, smem.sdOt()(_, _, part), tdVrdV, [](int) {}); };
  if constexpr (Traits::kModifiesScores) {
    compute_scores<Schedule>(params, smem, now, part, part, part, tSrS, tSrdP);
    convert(tSrS, rP);
  } else {
    scores_product<Schedule>(smem.sK(), smem.sQ()(_, _, part), tSrS);
    mask_scores<Schedule>(params, task, now, part, tSrS);
    exponentiate(tSrS, row_stats<Traits>(task, smem.lse_log2[0], part), params.scale_log2);
    convert(tSrS, rP);
    add_dv();
    scores_product<Schedule>(smem.sV(), smem.sdO()(_, _, part), tSrdP);
    differentiate(tSrdP, tSrS, row_stats<Traits>(task, smem.delta[0], part));
  }
  auto rdS = make_tensor_like<Element>(tSrdP);  // (MMA, MMA_N, MMA_M)
  convert(tSrdP, rdS);
  store_scores<Schedule>(rdS, smem.sdSt(), part);
  if constexpr (Traits::kModifiesScores) add_dv();
  auto tdKrdS = make_tensor(rdS.data(), operand_a_layout(rdS.layout()));  // (MMA, MMA_N, MMA_K)
  keys_product_rs<Schedule>(tdKrdS, smem.sQt()(_, _, part), tdKrdK, [](int) {});
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
