// The consumers' loop over key tiles: S = Q K^T, mask, softmax, O += P V.
//
// The two CTAs compute S and P of the key tiles by turns, each its warpgroups' 64 rows of it, and send each other P.
// Each adds P V of every tile to its own half of the columns of O. A CTA's softmax runs under the product of the tile
// before, which is the other CTA's (the seesaw of FlashMLA, between CTAs instead of warpgroups):
//
//     CTA 0 | O[0] += P(0) V(0) | S(2) | O[0] += P(1) V(1), softmax of S(2) | O[0] += P(2) V(2) | S(4) | ...
//     CTA 1 | S(1) | O[1] += P(0) V(0), softmax of S(1) | O[1] += P(1) V(1) | S(3) | O[1] += P(2) V(2), ...
//
// Both add the tiles in the same order, and P(i) is measured from the maximum in use after tile i, which the CTAs tell
// each other with P. A WGMMA group reads one unit of K or V; a unit is released when the next group has been issued and
// this one is done, so that the loads follow closely; those of the other CTA's tile when its product is complete.
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
#include "sm90/common/warpgroup.cuh"
#include "messages.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::pair_by_turns {

// A warpgroup's positions in the ring.
struct RingStates {
  PipelineState<kUnits> next{};  // to be read
  PipelineState<kUnits> held{};  // the first one that is not released
};

// Computes a tile for one warpgroup's rows and the CTA's columns. Leaves the unnormalized O in tOrO and the
// row statistics in softmax, and releases Q.
//
// A long function: its parts, the lambdas, work on the same dozen of tensors and pipeline states, which functions would
// all take as arguments. The loop over key tiles is at the end.
template <class Traits, class Accumulator>
CUTE_DEVICE void mainloop(FwdParams const& params, int tile_number, int warpgroup, typename Traits::SharedStorage& smem,
                          RingStates& states, Messages<Traits>& messages, OnlineSoftmax<2>& softmax,
                          Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  using Modifier = ScoresOf<Traits::kVariant.modifies_scores, kRows, kBlockN>;

  auto sQ = make_tensor(make_smem_ptr(smem.q[warpgroup]), typename Traits::SmemLayoutQ{});  // (64, D of chunk, chunk)
  auto sK = make_tensor(make_smem_ptr(smem.units[0]), typename Traits::SmemLayoutK{});      // (BLK_N, D of unit, unit)
  auto sVt = make_tensor(make_smem_ptr(smem.units[0]), typename Traits::SmemLayoutVt{});    // (D, N of unit, unit)

  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  auto tSrQ = mma_qk.get_slice(0).partition_fragment_A(sQ);   // (MMA, MMA_M, MMA_D, chunk)
  auto tSrK = mma_qk.get_slice(0).partition_fragment_B(sK);   // (MMA, MMA_N, MMA_D, unit)
  auto tOrV = mma_pv.get_slice(0).partition_fragment_B(sVt);  // (MMA, MMA_D, MMA_N, unit)
  auto tSrS = partition_fragment_C(mma_qk, Shape<Int<kRows>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
  auto rP = make_tensor_like<Element>(tSrS);                                    // (MMA, MMA_M, MMA_N)
  auto rP_other = make_tensor_like<Element>(tSrS);                              // (MMA, MMA_M, MMA_N)
  auto tOrP = make_tensor(rP.data(), operand_a_layout_64(rP.layout()));         // (MMA, MMA_M, MMA_K)
  auto tOrP_other = make_tensor(rP_other.data(), operand_a_layout_64(rP.layout()));  // (MMA, MMA_M, MMA_K)
  auto words = recast<uint32_t>(rP);                                                 // pairs of columns
  auto words_other = recast<uint32_t>(rP_other);
  auto scores = rowcol_view(tSrS);  // (rows, columns)
  auto acc = rowcol_view(tOrO);     // (rows, head dim)

  auto cS = make_identity_tensor(Shape<Int<kRows>, Int<kBlockN>>{});
  auto tScS_0 = rowcol_view(mma_qk.get_slice(_0{}).partition_C(cS));  // (rows, columns) -> (row, column) of thread 0
  auto coordinates = [&] {                                            // (rows, columns) -> (row, column)
    return rowcol_view(mma_qk.get_slice(fresh_thread_index() % 128).partition_C(cS));
  };

  auto tile = [&]() -> pair::RowTile const& { return smem.tile[opaque(tile_number) & 1]; };
  PipelineState<1> const q_state{0, tile_number & 1};
  int const chunks = chunks_of_k(params), rank = uniform(pair::rank_in_pair());

  clear(tOrO);
  auto const walk =
      pair::key_walk(params, uniform(tile().keys.begin), uniform(tile().keys.end), uniform(tile().wave));
  int const steps = walk.steps;
  smem.q_pipeline.wait_full(q_state);  // TMA: Q has landed
  if (rank >= steps) {
    __syncwarp();  // all lanes have waited for Q
    smem.q_pipeline.release(q_state);
    if (steps == 0) return;
  }
  auto const whole = pair::whole_tiles<kRows, kBlockN, Traits::kWarpgroups>(tile(), warpgroup);
  Modifier modify;
  modify.begin(params, tile(), tile().sequence, coordinates);
  int const first_row = uniform(tile().m_block) * kBlockM + warpgroup * kRows;

  auto release = [&]() __attribute__((always_inline)) {
    smem.ring.release(states.held);
    states.held.advance();
  };
  auto issue_scores_of_chunk = [&](auto accumulate, int chunk) __attribute__((always_inline)) {
    smem.ring.wait_full(states.next);        // TMA: the unit of K has landed
    auto tSrQ_chunk = tSrQ(_, _, _, chunk);  // (MMA, MMA_M, MMA_D)
    issue_gemm<decltype(accumulate)::value>(mma_qk, tSrQ_chunk, tSrK(_, _, _, states.next.stage), tSrS);
    states.next.advance();
    warpgroup_wait<1>();  // the groups before
  };
  // S(i). The last unit of K is held afterwards. `held`: so far it is the last one of V.
  auto issue_scores = [&](bool held) __attribute__((always_inline)) {
    issue_scores_of_chunk(C<Accumulate::kOverwrite>{}, 0);
    if (held) release();
#pragma unroll 1
    for (int chunk = 1; chunk < chunks; ++chunk) {
      issue_scores_of_chunk(C<Accumulate::kAdd>{}, chunk);
      release();
    }
  };
  // For each unit of a tile of V, issues a group, and calls then(unit).
  auto issue_product = [&](auto& tOrP_i, auto const& then) __attribute__((always_inline)) {
    warpgroup_fence_operand(tOrP_i);
    pair::static_for<kUnitsOfV>([&](auto unit) __attribute__((always_inline)) {
      smem.ring.wait_full(states.next);  // TMA: the unit of V has landed
      auto tOrO_part = pair::part_of_columns<unit>(tOrO);
      warpgroup_fence_operand(tOrO);
      warpgroup_arrive();
      pair::issue_unit(mma_pv, tOrP_i, tOrV(_, _, _, states.next.stage), tOrO_part);
      warpgroup_commit_batch();
      warpgroup_fence_operand(tOrO);
      states.next.advance();
      then(unit);
    });
    warpgroup_fence_operand(tOrP_i);
  };
  auto wait_all = [&]() __attribute__((always_inline)) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(tOrO);
  };
  auto scale_rows = [&](float const (&factors)[2]) __attribute__((always_inline)) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(acc); ++j) acc(r, j) *= factors[r];
    }
  };
  // P(i - 1) of the other CTA. Follows its maxima where some have grown.
  auto receive = [&]() __attribute__((always_inline)) {
    float offset[2], limit[2];
    messages.receive(words_other, offset, limit);
    bool const grown = offset[0] != softmax.offset[0] || offset[1] != softmax.offset[1];
    if (any_in_warpgroup(grown, kVote + warpgroup)) {
      wait_all();  // decided for the warpgroup: all its warps must execute each wait for a WGMMA
      float factors[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        factors[r] = exp2_approx(softmax.offset[r] - offset[r]);
        softmax.sum[r] *= factors[r];
        softmax.offset[r] = offset[r];
        softmax.limit[r] = limit[r];
      }
      scale_rows(factors);
    }
  };

#pragma unroll 1
  for (int i = rank; i < steps; i += 2) {
    issue_scores(i > rank);
    if (i > 0) {
      receive();
      issue_product(tOrP_other, [](auto) {});
      warpgroup_wait<kUnitsOfV>();
    } else {
      warpgroup_wait<0>();
    }
    warpgroup_fence_operand(tSrS);
    release();  // the last unit of K: S(i) is done
    if (i + 2 >= steps) smem.q_pipeline.release(q_state);  // the last S: the next tile's Q may be loaded

    int const n = walk.tile(i), first_key = n * kBlockN;
    typename Modifier::Shift shift;
    modify(params, scores, tScS_0, first_row - first_key, shift);
    if (!whole.contains(n)) {
      Sequence const& sequence = tile().sequence;
      apply_mask(scores, coordinates(), tScS_0, sequence, first_row - first_key, sequence.len_k - first_key);
    }
    // O is rescaled after the product in flight; P and the message need not wait for it.
    float factors[2] = {softmax.offset[0], softmax.offset[1]};
    OnlineSoftmax<2>::NoAccumulator later;
    using Nothing = OnlineSoftmax<2>::Nothing;
    bool const grown = softmax.update_max(scores, later, Nothing{}, Nothing{}, shift);
    softmax.numerators(scores, shift);
    convert(tSrS, rP);
    messages.send(words, softmax.offset, softmax.limit);
    wait_all();
    if (i > 0) {
      CUTE_UNROLL
      for (int unit = 0; unit < kUnitsOfV; ++unit) release();
    }
    if (grown) {
      factors[0] = exp2_approx(factors[0] - softmax.offset[0]);
      factors[1] = exp2_approx(factors[1] - softmax.offset[1]);
      scale_rows(factors);
    }
    issue_product(tOrP, [&](auto unit) __attribute__((always_inline)) {
      if constexpr (unit > 0) {
        warpgroup_wait<1>();
        release();
      }
    });
  }

  bool const own_last = ((steps - 1) & 1) == rank;
  // Called at two places: the compiler would serialise all WGMMAs if branches met with some in flight.
  auto const finish = [&]() __attribute__((always_inline)) {
    softmax.template finish<Element>();
    wait_all();
    release();  // the last unit of V
  };
  if (own_last) {
    finish();
  } else {
    receive();
    issue_product(tOrP_other, [&](auto unit) __attribute__((always_inline)) {
      warpgroup_wait<1>();
      if (unit > 0 || rank < steps) release();
    });
    finish();
  }
  // Each CTA has the sums over its own tiles.
  messages.send_sums(softmax.sum, softmax.error);
  float sum[2], error[2];
  messages.receive_sums(sum, error);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    softmax.sum[r] += sum[r];
    softmax.error[r] += error[r];
  }
}

}  // namespace flash_cute::sm90::forward::pair_by_turns
