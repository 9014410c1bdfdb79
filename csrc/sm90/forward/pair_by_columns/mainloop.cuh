// The consumers' loop over key tiles: S = Q K^T, mask, softmax, O += P V.
//
// The two warpgroups compute S and P of the key tiles by turns, and each adds P V to its own half of the columns of O,
// with P from registers for the tiles that it computed, and from shared memory for the others. So one warpgroup's
// softmax runs under the other's products (the seesaw of FlashMLA):
//
//     warpgroup 0 | P(0) | O[0] += P(0) V(0), S(2) | O[0] += P(1) V(1), max S(2) | P(2) | O[0] += P(2) V(2), ...
//     warpgroup 1 | S(1) | O[1] += P(0) V(0), max S(1) | P(1) | O[1] += P(1) V(1), S(3) | O[1] += P(2) V(2), ...
//
// Both add the tiles in the same order, and P(i) is measured from the maximum in use after tile i, which the warpgroups
// hand to each other with P. A WGMMA group reads one unit of K or V; a unit is released when the next group has been
// issued and this one is done, so that the loads follow closely; those of the other warpgroup's tile when its product
// is complete.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "core/mask.cuh"
#include "core/registers.cuh"
#include "core/softmax.cuh"
#include "sm90/forward/pair/key_walk.cuh"
#include "sm90/forward/pair/products.cuh"
#include "sm90/forward/pair/scores.cuh"
#include "sm90/common/store_tma.cuh"
#include "sm90/common/warpgroup.cuh"
#include "exchange.cuh"
#include "messages.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::pair_by_columns {

// A warpgroup's positions in the rings.
struct RingStates {
  int tiles_of_k = 0;  // read so far
  PipelineState<kUnitsOfVRing> v{};
};

// Computes a tile for the half of the columns that is `warpgroup`'s, which has kParts parts, see parts_of_v. Leaves the
// unnormalized O in tOrO and the row statistics in softmax, and releases Q.
//
// A long function: its parts, the lambdas, work on the same dozen of tensors and pipeline states, which functions would
// all take as arguments. The loop over key tiles is at the end.
template <class Traits, int kParts, class Accumulator>
CUTE_DEVICE void mainloop(FwdParams const& params, int tile_number, int warpgroup, typename Traits::SharedStorage& smem,
                          RingStates& states, Messages<Traits>& messages,
                          ScoreExchange<Traits>& exchange, OnlineSoftmax<2>& softmax,
                          Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  using Modifier = ScoresOf<Traits::kVariant.modifies_scores, kBlockM, kBlockN>;
  constexpr int kStepsPerUnit = kUnitKeys / 16;
  constexpr int kUnitsOfV = kParts * kBlockN / kUnitKeys;  // per tile
  static_assert(kUnitsOfVRing % kUnitsOfV == 0, "the stages of a tile follow each other");

  auto sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutQ{});        // (64, D of unit, unit)
  auto sK = make_tensor(make_smem_ptr(smem.k[0]), typename Traits::SmemLayoutK{});     // (BLK_N, D of unit, unit)
  auto sVt =
      make_tensor(make_smem_ptr(smem.v[warpgroup][0]), typename Traits::SmemLayoutVt{});  // (D / 2, N of unit, unit)
  auto sP = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(smem.p[warpgroup])),
                        typename Traits::SmemLayoutP{});  // (64, BLK_N)
  auto sP_other = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(smem.p[1 - warpgroup])),
                              typename Traits::SmemLayoutP{});

  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  typename Traits::MmaSharedPV mma_shared_pv;
  auto tSrQ = mma_qk.get_slice(0).partition_fragment_A(sQ);                    // (MMA, MMA_M, MMA_D, unit)
  auto tSrK = mma_qk.get_slice(0).partition_fragment_B(sK);                    // (MMA, MMA_N, MMA_D, unit)
  auto tOrV = mma_pv.get_slice(0).partition_fragment_B(sVt);                   // (MMA, MMA_D, MMA_N, unit)
  auto tOrP_other = mma_shared_pv.get_slice(0).partition_fragment_A(sP_other);  // (MMA, MMA_M, MMA_N)
  auto tSrS = partition_fragment_C(mma_qk, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
  auto rP = make_tensor_like<Element>(tSrS);                                      // (MMA, MMA_M, MMA_N)
  auto tOrP = make_tensor(rP.data(), operand_a_layout_64(rP.layout()));           // (MMA, MMA_M, MMA_K)
  auto scores = rowcol_view(tSrS);                                                // (rows, columns)
  auto acc = rowcol_view(tOrO);                                                   // (rows, head dim)

  auto cS = make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{});
  auto tScS_0 = rowcol_view(mma_qk.get_slice(_0{}).partition_C(cS));  // (rows, columns) -> (row, column) of thread 0
  auto coordinates = [&] {                                             // (rows, columns) -> (row, column)
    return rowcol_view(mma_qk.get_slice(fresh_thread_index() % 128).partition_C(cS));
  };

  auto tile = [&]() -> pair::RowTile const& { return smem.tile[opaque(tile_number) & 1]; };
  PipelineState<1> const q_state{0, tile_number & 1};
  auto& k_pipeline = smem.k_pipeline[warpgroup];
  auto& v_pipeline = smem.v_pipeline[warpgroup];
  int const units = units_of_k(params);
  int held_stage = -1;  // of the last unit of V of the own product, while it is held
  auto release_held = [&] {
    if (held_stage >= 0) v_pipeline.release_stage(held_stage);
    held_stage = -1;
  };
  auto issue_scores_of_unit = [&](auto accumulate, PipelineState<kUnitsOfK> state) __attribute__((always_inline)) {
    k_pipeline.wait_full(state);                  // TMA: the unit of K has landed
    auto tSrQ_unit = tSrQ(_, _, _, state.stage);  // (MMA, MMA_M, MMA_D)
    issue_gemm<decltype(accumulate)::value>(mma_qk, tSrQ_unit, tSrK(_, _, _, state.stage), tSrS);
    warpgroup_wait<1>();  // the last group
  };
  // The last unit of K is held afterwards.
  auto issue_scores = [&]() __attribute__((always_inline)) {
    int const phase = states.tiles_of_k++ & 1;
    issue_scores_of_unit(C<Accumulate::kOverwrite>{}, {0, phase});
    release_held();
#pragma unroll 1
    for (int unit = 1; unit < units; ++unit) {
      issue_scores_of_unit(C<Accumulate::kAdd>{}, {unit, phase});
      k_pipeline.release_stage(unit - 1);
    }
  };
  auto wait_all = [&] {
    warpgroup_wait<0>();
    warpgroup_fence_operand(tOrO);
  };
  // For each unit of a tile of V, issues a group by issue(unit, V of the unit), and calls then(unit).
  auto issue_product = [&](auto const& issue, auto const& then) __attribute__((always_inline)) {
    pair::static_for<kUnitsOfV>([&](auto unit) __attribute__((always_inline)) {
      v_pipeline.wait_full(states.v);  // TMA: the unit of V has landed
      warpgroup_fence_operand(tOrO);
      warpgroup_arrive();
      issue(unit, tOrV(_, _, _, states.v.stage));
      warpgroup_commit_batch();
      warpgroup_fence_operand(tOrO);
      then(unit);
      states.v.advance();
    });
  };
  // O += P V of the other warpgroup's tile. Its first units are released as soon as they have been read, so that V of
  // the own tile is on its way while the other CTA's part of S is waited for; the last ones are held.
  constexpr int kReleasedEarly = kUnitsOfV / 2;
  int first_held = 0;  // its stage
  auto issue_shared_product = [&]() __attribute__((always_inline)) {
    RowPairs rows;
    if (messages.receive(rows)) {
      wait_all();  // decided for the warpgroup: all its warps must execute each wait for a WGMMA
      follow_maxima(softmax, rows, acc);
    }
    int const first = states.v.stage;
    issue_product(
        [&](auto unit, auto const& tOrV_unit) __attribute__((always_inline)) {
          auto tOrO_part = pair::part_of_columns<unit % kParts>(tOrO);
          pair::issue_unit<unit / kParts * kStepsPerUnit>(mma_shared_pv, tOrP_other, tOrV_unit, tOrO_part);
        },
        [&](auto unit) __attribute__((always_inline)) {
          if constexpr (unit <= kReleasedEarly) warpgroup_wait<1>();  // the group before
          if constexpr (unit == 0) {
            release_held();
          } else if constexpr (unit <= kReleasedEarly) {
            v_pipeline.release_stage(first + unit - 1);
          }
        });
    first_held = first + kReleasedEarly;
  };
  auto release_shared_product = [&] {
    CUTE_UNROLL
    for (int i = 0; i < kUnitsOfV - kReleasedEarly; ++i) v_pipeline.release_stage(first_held + i);
    messages.release();
    exchange.release_buffer_of_other();
  };
  // O += P V of the own tile. Its last unit is held.
  auto issue_own_product = [&]() __attribute__((always_inline)) {
    warpgroup_fence_operand(tOrP);
    issue_product(
        [&](auto unit, auto const& tOrV_unit) __attribute__((always_inline)) {
          auto tOrO_part = pair::part_of_columns<unit % kParts>(tOrO);
          pair::issue_unit<unit / kParts * kStepsPerUnit>(mma_pv, tOrP, tOrV_unit, tOrO_part);
        },
        [&](auto unit) __attribute__((always_inline)) {
          if constexpr (unit > 0) {
            warpgroup_wait<1>();
            release_held();
          }
          held_stage = states.v.stage;
        });
    warpgroup_fence_operand(tOrP);
  };
  auto store_p = [&] {
    using Store = Copy_Atom<SM90_U32x4_STSM_N, Element>;
    auto const copy_out = make_tiled_copy_C(Store{}, mma_qk).get_slice(fresh_thread_index() % 128);
    auto tPrP = copy_out.retile_S(rP);      // (CPY, CPY_M, CPY_N)
    auto tPsP = copy_out.partition_D(sP);   // (CPY, CPY_M, CPY_N)
    CUTE_STATIC_ASSERT_V(size(tPrP) == size(tPsP));
    copy(Store{}, tPrP, tPsP);
  };

  clear(tOrO);
  auto const walk =
      pair::key_walk(params, uniform(tile().keys.begin), uniform(tile().keys.end), uniform(tile().wave));
  int const steps = walk.steps;
  smem.q_pipeline.wait_full(q_state);  // TMA: Q has landed
  if (warpgroup >= steps) {
    __syncwarp();  // all lanes have waited for Q
    smem.q_pipeline.release(q_state);
    if (steps == 0) return;
  }
  auto const whole = pair::whole_tiles<kBlockM, kBlockN, /*kWarpgroups=*/1>(tile(), 0);
  Modifier modify;
  modify.begin(params, tile(), tile().sequence, coordinates);
  int const first_row = uniform(tile().m_block) * kBlockM;

#pragma unroll 1
  for (int i = warpgroup; i < steps; i += 2) {
    issue_scores();
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrS);
    k_pipeline.release_stage(units - 1);  // S(i) is done
    exchange.send(tSrS);
    // The other CTA's part of S arrives under the softmax of the other warpgroup.
    if (i > 0) issue_shared_product();
    warpgroup_fence_operand(tSrS);
    if (i + 2 >= steps) smem.q_pipeline.release(q_state);  // the last S: the next tile's Q may be loaded
    exchange.add_other_part(tSrS);

    int const n = walk.tile(i), first_key = n * kBlockN;
    typename Modifier::Shift shift;
    modify(params, scores, tScS_0, first_row - first_key, shift);
    if (!whole.contains(n)) {
      Sequence const& sequence = tile().sequence;
      apply_mask(scores, coordinates(), tScS_0, sequence, first_row - first_key, sequence.len_k - first_key);
    }
    auto const release_other = [&] {
      if (i > 0) release_shared_product();
    };
    bool const grown = softmax.update_max(scores, acc, wait_all, release_other, shift);
    softmax.numerators(scores, shift);
    convert(tSrS, rP);
    messages.send({{softmax.offset[0], softmax.limit[0]}, {softmax.offset[1], softmax.limit[1]}}, grown, store_p);
    issue_own_product();
  }

  bool const own_last = ((steps - 1) & 1) == warpgroup;
  if (own_last) {
    softmax.template finish<Element>();
    wait_all();
    release_held();
  } else {
    issue_shared_product();
    softmax.template finish<Element>();
    wait_all();
    release_shared_product();
  }
  // Each warpgroup has the sums over its own tiles.
  constexpr bool kGrown = false;  // no maximum is left that could have
  auto const nothing_more = [] {};
  messages.send({{softmax.sum[0], softmax.error[0]}, {softmax.sum[1], softmax.error[1]}}, kGrown, nothing_more);
  RowPairs other;
  messages.receive(other);
  __syncwarp();  // all lanes have read them
  messages.release();
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    softmax.sum[i] += other[i].x;
    softmax.error[i] += other[i].y;
  }
}

}  // namespace flash_cute::sm90::forward::pair_by_columns
