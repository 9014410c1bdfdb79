// The consumer's loop over key tiles, from the last to the first: S = Q K^T, mask, softmax, O += P V.
//
// A step issues S(n) and then O += P V of the step before, so that the tensor cores run that GEMM while the maximum of
// S(n) is computed, and during the rest of the step the GEMMs of the other warpgroups, if there are any:
//
//     tensor cores | S(n) | O += P(n+1) V(n+1) |         other warpgroups' GEMMs         |  S(n-1) | ...
//     warpgroup    |      |     max S(n)       | rescale O?, exp2, sums, convert to P(n) | ...
//
// With ping-pong a warpgroup waits for its turn before S(n), and hands it on after issuing both GEMMs.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "core/mask.cuh"
#include "core/registers.cuh"
#include "core/score.cuh"
#include "core/softmax.cuh"
#include "capped_scores.cuh"
#include "traits.cuh"
#include "sm90/forward/common/place.cuh"
#include "sm90/forward/common/scheduler.cuh"
#include "sm90/forward/common/scores.cuh"
#include "sm90/forward/common/warpgroup_keys.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::forward::rows {

// Computes one warpgroup's rows of the CTA's tile, whose keys `tiles` has. Leaves the unnormalized O in tOrO and the
// row statistics in softmax, with kReadsAhead the next tile in `tiles`; releases Q.
//
// A long function: its parts, the lambdas, work on the same dozen of tensors and pipeline states, which functions would
// all take as arguments. `step` is a key tile; the loops over them are at the end.
template <class Traits, class Accumulator>
CUTE_DEVICE void mainloop(FwdParams const& params, int tile_number, int warpgroup, typename Traits::SharedStorage& smem,
                          WarpgroupKeys<Traits>& tiles, OnlineSoftmax<2>& softmax,
                          Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  using Turn = TurnRing<Traits::kWarpgroups, Traits::kTile.ping_pong>;
  constexpr int kRows = Traits::kRows, kBlockN = Traits::kBlockN, kHeadDimV = Traits::kHeadDimV;

  // Opaque: else ptxas rematerialises Q's descriptors in each step.
  auto q_state = [&] { return Traits::q_state(opaque(tile_number)); };
  auto sQ = make_tensor(make_smem_ptr(smem.q[q_state().stage][warpgroup]), typename Traits::SmemLayoutQ{});  // (64, D)
  auto sK = make_tensor(make_smem_ptr(smem.k[0]), typename Traits::SmemLayoutK{});    // (BLK_N, D, stage)
  auto sVt = make_tensor(make_smem_ptr(smem.v[0]), typename Traits::SmemLayoutVt{});  // (D, BLK_N, stage)

  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  auto const thread_qk = mma_qk.get_slice(0);  // descriptors are the same for all threads
  auto const thread_pv = mma_pv.get_slice(0);
  auto tSrQ = thread_qk.partition_fragment_A(sQ);   // (MMA, MMA_M, MMA_D)
  auto tSrK = thread_qk.partition_fragment_B(sK);   // (MMA, MMA_N, MMA_D, stage)
  auto tOrV = thread_pv.partition_fragment_B(sVt);  // (MMA, MMA_D, MMA_N, stage)
  auto tSrS = partition_fragment_C(mma_qk, Shape<Int<kRows>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
  auto rP = make_tensor_like<Element>(tSrS);                                     // (MMA, MMA_M, MMA_N)
  auto tOrP = make_tensor(rP.data(), operand_a_layout_64(rP.layout()));       // (MMA, MMA_M, MMA_K)
  auto scores = rowcol_view(tSrS);                                               // (rows, columns)
  auto acc = rowcol_view(tOrO);                                                  // (rows, head dim)

  auto cS = make_identity_tensor(Shape<Int<kRows>, Int<kBlockN>>{});
  auto tScS_0 = rowcol_view(mma_qk.get_slice(_0{}).partition_C(cS));  // (rows, columns) -> (row, column) of thread 0

  static_assert(Traits::kStages == 2);
  auto tile = [&]() -> TileCoord const volatile& { return smem.tile[opaque(tile_number) & 1]; };
  // Lengths and mask of the tile's sequence. Where they are in shared memory they are read again at each use, and for
  // branches made uniform.
  auto sequence = [&]() -> auto const& { return lengths_of(params, smem.tile[opaque(tile_number) & 1]); };
  auto uniform_lengths = [&]() -> decltype(auto) {
    return uniform_lengths_of(params, smem.tile[opaque(tile_number) & 1]);
  };
  PipelineState<2> k_state = at_step(tiles.count), v_state = k_state;
  auto issue_qk = [&] {
    if constexpr (Traits::kComputesDescriptors) {
      static_assert(Traits::kSmem.q_stages == 1);
      auto sQ_again = make_tensor(make_smem_ptr(smem.q[0][opaque(warpgroup)]), typename Traits::SmemLayoutQ{});
      auto tSrQ_again = thread_qk.partition_fragment_A(sQ_again);  // (MMA, MMA_M, MMA_D)
      issue_gemm<Accumulate::kOverwrite>(mma_qk, tSrQ_again, tSrK(_, _, _, k_state.stage), tSrS);
    } else {
      issue_gemm<Accumulate::kOverwrite>(mma_qk, tSrQ, tSrK(_, _, _, k_state.stage), tSrS);
    }
  };
  auto issue_pv = [&] { issue_gemm<Accumulate::kAdd>(mma_pv, tOrP, tOrV(_, _, _, v_state.stage), tOrO); };
  auto release_k = [&] {
    smem.k_pipeline.release(k_state);
    k_state.advance();
  };
  auto release_v = [&] {
    smem.v_pipeline.release(v_state);
    v_state.advance();
  };
  int offset;  // the key tile's: the tile's first row minus its first column
  using Modifier = ScoresOf<Traits::kVariant.modifies_scores, kRows, kBlockN>;
  Modifier modify;
  // Turns S(n) into P(n), and rescales the accumulator if the maximum changes.
  using Softmax = OnlineSoftmax<2>;
  [[maybe_unused]] CappedScores<decltype(scores)> capped{softmax, scores, params.score};
  auto finish_scores = [&](auto&& mask, auto& rescaled, auto wait_product,
                           auto release) __attribute__((always_inline)) {
    if constexpr (Traits::kFoldsSoftcap) {
      static_assert(!Traits::kTile.late_wait);
      if (params.score.softcap_scale != 0.f && params.score.slopes == nullptr) {
        capped.finish(mask, rescaled, wait_product, release);
        convert(tSrS, rP);
        return;
      }
    }
    typename Modifier::Shift shift;
    modify(params, scores, tScS_0, offset, shift);
    mask();
    softmax.update_max<Traits::kTile.late_wait>(scores, rescaled, wait_product, release, shift);
    softmax.numerators(scores, shift);
    convert(tSrS, rP);  // no branch in between, so that conversions overlap with the exponentials
  };
  auto step = [&](auto&& mask) __attribute__((always_inline)) {
    smem.k_pipeline.wait_full(k_state);  // TMA: K(n) has landed
    Turn::take(warpgroup);               // the warpgroup before has issued its GEMMs
    issue_qk();
    smem.v_pipeline.wait_full(v_state);  // TMA: V(n+1) has landed
    issue_pv();                          // of the key tile before
    Turn::hand_on(warpgroup);
    warpgroup_wait<1>();  // S(n)
    warpgroup_fence_operand(tSrS);
    release_k();
    auto const wait_product = [&] {
      warpgroup_wait<0>();
      warpgroup_fence_operand(tOrO);
    };
    finish_scores(mask, acc, wait_product, release_v);
  };

  // A CTA's key tiles are those that any of its rows sees. A warpgroup releases those that none of its own rows sees
  // without using them, and hands on its turns.
  auto pass_on = [&](int count, int turns) {
#pragma unroll 1
    for (; count > 0; --count) {
      smem.k_pipeline.wait_full(k_state);
      __syncwarp();  // all lanes have waited
      release_k();
      smem.v_pipeline.wait_full(v_state);
      __syncwarp();
      release_v();
      if (--turns < 0) continue;
      Turn::take(warpgroup);
      Turn::hand_on(warpgroup);
    }
  };

  auto read_next = [&] {
    if constexpr (Traits::kReadsAhead) tiles.read(params, smem, tile_number + 1, warpgroup);
  };

  clear(tOrO);
  smem.q_pipeline[warpgroup].wait_full(q_state());  // TMA: the warpgroup's rows of Q have landed
  if constexpr (Traits::kConvertsQueries) Traits::convert_queries(smem, warpgroup, q_state().stage);
  if (tiles.begin == tiles.end) {
    int const count = tiles.before + tiles.after;
    pass_on(count, count - 1);  // one turn fewer than key tiles, as in every warpgroup: the first S needs no turn
    __syncwarp();               // all lanes have waited for Q
    smem.q_pipeline[warpgroup].release(q_state());
    read_next();
    return;
  }
  pass_on(tiles.after, tiles.after);

  int left = tiles.end - tiles.begin - 1;                    // key tiles after this one
  offset = tiles.first_row - (tiles.end - 1) * kBlockN;
  modify.begin(params, tile(), sequence(),
               [&] { return rowcol_view(mma_qk.get_slice(threadIdx.x % 128).partition_C(cS)); });
  auto mask = [&](int columns) __attribute__((always_inline)) {
    // (rows, columns) -> (row, column)
    auto tScS = rowcol_view(mma_qk.get_slice(fresh_thread_index() % 128).partition_C(cS));
    apply_mask(scores, tScS, tScS_0, sequence(), offset, columns);
  };
  // Masks a tile if it crosses an edge.
  auto mask_at_edge = [&](int n, int columns) __attribute__((always_inline)) {
    forward::mask_at_edge(params, smem.tile[0], tiles, n, offset, columns, mask);
  };
  smem.k_pipeline.wait_full(k_state);
  issue_qk();
  warpgroup_wait<0>();
  warpgroup_fence_operand(tSrS);
  release_k();
  // Not acc: it is 0 here, and ptxas would turn its rescaling into 130 to 200 moves per tile and warp.
  Softmax::NoAccumulator none;
  finish_scores([&] { mask_at_edge(tiles.end - 1, uniform_lengths().len_k - (tiles.end - 1) * kBlockN); }, none, [] {},
                [] {});
  // Without a lower edge there is one loop for the tiles at the upper edge and one for the whole tiles: a test per step
  // costs 2 % at head dims 64 and 128, and nothing above.
  if (kHeadDimV <= 128 && !uniform_lengths().band.has_lower()) {
    for (int const whole = tiles.whole_end - tiles.begin; left > whole; --left) {
      offset += kBlockN;
      step([&] { mask(kBlockN); });
    }
    for (; left > 0; --left) {
      if constexpr (Traits::kVariant.modifies_scores) offset += kBlockN;
      step(NoMask{});
    }
  }
  for (; left > 0; --left) {
    offset += kBlockN;
    step([&] { mask_at_edge(tiles.begin + left - 1, kBlockN); });
  }

  smem.q_pipeline[warpgroup].release(q_state());  // the last S has been computed: the next tile's Q may be loaded
  smem.v_pipeline.wait_full(v_state);             // TMA: V of the last key tile has landed
  issue_pv();
  softmax.template finish<Element>();
  // What the next tile needs is computed under the last product, unless the producer waits for this warpgroup to pass
  // on what is left of this tile.
  int const before = tiles.before;
  if (before == 0) read_next();
  warpgroup_wait<0>();
  warpgroup_fence_operand(tOrO);
  release_v();
  if (before > 0) {
    pass_on(before, before);
    read_next();
  }
}

}  // namespace flash_cute::sm90::forward::rows
