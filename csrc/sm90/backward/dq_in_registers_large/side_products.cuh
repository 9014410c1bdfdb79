// The products of a CTA above head dim 320, by two warpgroups. They compute the scores of the steps by turns, and each
// adds W X of every step to its own half of the CTA's columns, W being P^T, dS^T or dS as all CTAs have made it, X the
// streamed tile:
//
//     warpgroup 0 | sums += W(0) X(0)                | S(2), sums += W(1) X(1) | sums += W(2) X(2) | S(4), ...
//     warpgroup 1 | S(1), sums += W(0) X(0) | sums += W(1) X(1) | S(3), sums += W(2) X(2) | ...
//
// The scores of a step are sent when W of the step before has come, and W of the step comes back while the sums of the
// step before and the scores of the next one are computed. A warpgroup waits for each product before it issues the next
// one, for which the sums leave no registers; the other one's products run then.
#pragma once

#include <type_traits>

#include <cute/tensor.hpp>

#include "core/layout.cuh"
#include "side_traits.cuh"

namespace flash_cute::sm90::backward::dq_in_registers_large {

// A warpgroup's half of the CTA's columns of a gradient, 0 at first.
template <class Traits>
struct SideSums {
  using Fragment = decltype(partition_fragment_C(typename Traits::MmaSums{},
                                                 Shape<_64, Int<Traits::kUnitColumns>>{}));  // (MMA, MMA_M, MMA_N)
  Fragment units[Traits::kUnitsOfSums];

  // Volatile, so that the zeros follow setmaxnreg: before it, the warpgroup has no registers for them, and they spill.
  CUTE_DEVICE SideSums() {
    CUTE_UNROLL
    for (int unit = 0; unit < Traits::kUnitsOfSums; ++unit) {
      CUTE_UNROLL
      for (int i = 0; i < size(units[unit]); ++i) {
        asm volatile("mov.f32 %0, 0f00000000;" : "=f"(units[unit](i)));
      }
    }
  }
};
// Of a side without a gradient.
struct NoSums {};

// When a warpgroup reads W of a step, if it also computes the scores of the next one. Under them is faster for dQ by
// 7 %, and slower for dK and dV by 5 % (head dim 512).
enum class ReadW { kUnderScores, kAfterScores };

// `sums`: SideSums or NoSums. A side without a gradient waits for W all the same, since that says that the buffers of
// the parts are free.
template <class Traits, ReadW kReadW, class Storage, class Sums>
CUTE_DEVICE void compute_products(Storage& smem, int steps, int warpgroup, Sums& sums) {
  constexpr bool kHasSums = !std::is_same_v<Sums, NoSums>;
  using Element = typename Traits::Element;
  constexpr int kUnits = Traits::kUnits;
  typename Traits::MmaScores mma_scores;
  typename Traits::MmaSums mma_sums;
  Operands const operands(smem);
  auto sA = make_tensor(make_smem_ptr(smem.resident[0]), typename Traits::SmemLayout{});   // (64, columns of unit)
  auto sX = make_tensor(make_smem_ptr(smem.stream[0]), typename Traits::SmemLayout{});     // (64, columns of unit)
  auto sXt = make_tensor(make_smem_ptr(smem.stream[0]), typename Traits::SmemLayoutT{});   // (columns of unit, 64)
  auto tSrA = mma_scores.get_slice(0).partition_fragment_A(sA);                            // (MMA, MMA_M, MMA_K)
  auto tSrX = mma_scores.get_slice(0).partition_fragment_B(sX);                            // (MMA, MMA_N, MMA_K)
  auto tGrX = mma_sums.get_slice(0).partition_fragment_B(sXt);                             // (MMA, MMA_N, MMA_K)
  auto tSrS = partition_fragment_C(mma_scores, Shape<_64, _64>{});                         // (MMA, MMA_M, MMA_N)
  auto rW = make_tensor_like<Element>(tSrS);                                               // (MMA, MMA_M, MMA_N)
  auto tGrW = make_tensor(rW.data(), operand_a_layout_64(rW.layout()));                    // (MMA, MMA_M, MMA_K)

  auto const unit_state = [](int step, int unit) {
    return PipelineState<Traits::kStages * kUnits>{(step & 1) * kUnits + unit, (step >> 1) & 1};
  };
  auto issue_scores_of_unit = [&](auto accumulate, int step, int i) __attribute__((always_inline)) {
    int const unit = Traits::unit_in_order(warpgroup, i);  // the steps of a warpgroup's scores have its parity
    auto const state = unit_state(step, unit);
    smem.stream_pipeline.wait_full(state);  // TMA: the unit has landed
    auto tSrA_unit = operands.at(tSrA, smem.resident[unit]);  // (MMA, MMA_M, MMA_K)
    issue_gemm<decltype(accumulate)::value>(mma_scores, tSrA_unit, operands.at(tSrX, smem.stream[state.stage]), tSrS);
  };
  auto issue_scores = [&](int step) __attribute__((always_inline)) {
    issue_scores_of_unit(C<Accumulate::kOverwrite>{}, step, 0);
    CUTE_UNROLL
    for (int i = 1; i < kUnits; ++i) issue_scores_of_unit(C<Accumulate::kAdd>{}, step, i);
  };
  auto wait_for_w = [&](int step) __attribute__((always_inline)) {
    uint64_t& full = smem.fragment_full[step & 1];
    wait_for_cluster(full, (step >> 1) & 1);  // all CTAs have sent their pieces of W
    if (warpgroup == 0 && fresh_thread_index() % 128 == 0) set_barrier_transaction_bytes(full, kFragmentBytes);
  };
  auto wait_for_scores = [&](int step) __attribute__((always_inline)) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrS);
    if constexpr (!kHasSums) {
      CUTE_UNROLL
      for (int unit = 0; unit < kUnits; ++unit) smem.stream_pipeline.release(unit_state(step, unit));
    }
  };
  auto send_scores = [&] __attribute__((always_inline)) {
    jitter();
    send_parts<Traits::kCtas>(smem.parts, smem.parts_full, tSrS);
  };
  auto issue_sums = [&](int step, auto& units) __attribute__((always_inline)) {
    static_assert(Traits::kUnitsOfSums == 2);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kUnitsOfSums; ++i) {
      auto const state = unit_state(step, warpgroup * Traits::kUnitsOfSums + i);
      smem.stream_pipeline.wait_full(state);  // TMA: the unit has landed, as the scores' warpgroup has seen
      issue_gemm<Accumulate::kAdd>(mma_sums, tGrW, operands.at(tGrX, smem.stream[state.stage]), units[i]);
    }
  };
  auto finish_sums = [&](int step, auto& units) __attribute__((always_inline)) {
    warpgroup_wait<1>();
    warpgroup_fence_operand(units[0]);
    smem.stream_pipeline.release(unit_state(step, warpgroup * Traits::kUnitsOfSums));
    warpgroup_wait<0>();
    warpgroup_fence_operand(units[1]);
    smem.stream_pipeline.release(unit_state(step, warpgroup * Traits::kUnitsOfSums + 1));
  };

  if (steps == 0) return;
  smem.resident_pipeline.wait_full({});  // TMA: the cluster's own tile has landed
  if (warpgroup == 0) {
    issue_scores(0);
    wait_for_scores(0);
    send_scores();
  }
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    bool const has_scores = i + 1 < steps && (i + 1) % 2 == warpgroup;
    // Scores are sent when W of step i is there: all CTAs have read the parts of that step, of which its pieces are
    // made.
    if constexpr (kReadW == ReadW::kUnderScores) {
      if (has_scores) {
        issue_scores(i + 1);
        wait_for_w(i);
        load_fragment(smem.fragments[i & 1], rW);
        wait_for_scores(i + 1);
        issue_sums(i, sums.units);
        send_scores();
        finish_sums(i, sums.units);
        continue;
      }
      wait_for_w(i);
    } else {
      if (has_scores) {
        issue_scores(i + 1);
        wait_for_scores(i + 1);
      }
      wait_for_w(i);
      if (has_scores) send_scores();
    }
    if constexpr (kHasSums) {
      load_fragment(smem.fragments[i & 1], rW);
      issue_sums(i, sums.units);
      finish_sums(i, sums.units);
    }
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
