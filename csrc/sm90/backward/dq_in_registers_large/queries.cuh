// dQ for head dims 257 to 320. A CTA owns 64 query rows and loops over the key tiles that they see, from the last to
// the first. One warpgroup computes S, dP and dS, the other sums dQ:
//
//     tensor cores | dP(n)      , S(n-1)           | dP(n-1)    , S(n-2)
//                  | dQ += dS(n+1) K(n+1)          | dQ += dS(n) K(n)
//     warpgroup 0  | P(n) from S(n), dS(n) to smem | P(n-1) from S(n-1), ...
//
// V's tile has one buffer: it is free when dP is computed, and needed again a step later. One thread of a third
// warpgroup issues all loads.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "core/mask.cuh"
#include "core/registers.cuh"
#include "sm90/backward/common/place.cuh"
#include "sm90/common/warpgroup.cuh"
#include "epilogue.cuh"
#include "load.cuh"
#include "scores.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::backward::dq_in_registers_large {

// P = exp(scale Q K^T - lse), dS = P (dO V^T - delta).
template <class Traits>
CUTE_DEVICE void scores_consumer(KernelArgs const& args, typename Traits::QueriesStorage& smem) {
  using Element = typename Traits::Element;
  BwdParams const& params = args.params;
  RowTileTask const volatile& tile = smem.tile;
  int const steps = key_steps(tile);
  if (steps == 0) return;
  int const whole_begin = uniform(tile.key_tiles.whole_begin);  // key tiles that need no mask
  int const whole_size = uniform(tile.key_tiles.whole_end) - whole_begin;
  int const last_key_tile = uniform(tile.key_tiles.end) - 1, first_row = uniform(tile.m_block) * kTileRows;
  OwnStatistics const own(params, smem.tile);
  Products<Traits> products;
  Operands const operands(smem);
  auto tSrQ = products.a_operand(smem.q);       // (MMA, MMA_M, MMA_D)
  auto tSrdO = products.a_operand(smem.dout);   // (MMA, MMA_M, MMA_D)
  auto tSrK = products.b_operand(smem.k[0]);    // (MMA, MMA_N, MMA_D)
  auto tSrV = products.b_operand(smem.v);       // (MMA, MMA_N, MMA_D)
  auto tSrS = products.scores();                // (MMA, MMA_M, MMA_N)
  auto tSrdP = products.scores();               // (MMA, MMA_M, MMA_N)
  auto tSrP = make_tensor_like(tSrS);           // (MMA, MMA_M, MMA_N): S, and then P of the step
  auto scores = rowcol_view(tSrP);              // (rows, keys)
  auto dscores = rowcol_view(tSrdP);            // (rows, keys)
  auto rdS = make_tensor_like<Element>(tSrdP);  // (MMA, MMA_M, MMA_N)
  auto cS = make_identity_tensor(Shape<_64, _64>{});                               // (rows, keys) -> (row, key)
  auto tScS_0 = rowcol_view(products.mma_scores.get_slice(_0{}).partition_C(cS));  // the same of thread 0, static
  auto const coordinates = [&] {
    return rowcol_view(products.mma_scores.get_slice(fresh_thread_index() % 128).partition_C(cS));
  };

  PipelineState<kStagesOfKeys> k_state;
  auto issue_s = [&] __attribute__((always_inline)) {
    auto tSrQ_now = operands.at(tSrQ, smem.q);  // (MMA, MMA_M, MMA_D)
    issue_gemm<Accumulate::kOverwrite>(products.mma_scores, tSrQ_now, operands.at(tSrK, smem.k[k_state.stage]), tSrS);
  };
  auto issue_dp = [&](int step) __attribute__((always_inline)) {
    auto tSrdO_now = operands.at(tSrdO, smem.dout);  // (MMA, MMA_M, MMA_D)
    auto tSrV_now = operands.at(tSrV, smem.v);       // (MMA, MMA_N, MMA_D)
    smem.v_pipeline.wait_full({0, step & 1});        // TMA: the first unit of V has landed
    issue_scores_of_unit<Traits, Accumulate::kOverwrite, 0>(products.mma_scores, tSrdO_now, tSrV_now, tSrdP);
    smem.v_pipeline.wait_full({1, step & 1});  // the second one
    issue_scores_of_unit<Traits, Accumulate::kAdd, 1>(products.mma_scores, tSrdO_now, tSrV_now, tSrdP);
  };
  smem.rows_pipeline.wait_full({});    // TMA: Q and dO have landed
  smem.k_pipeline.wait_full(k_state);  // TMA: K has landed
  issue_s();
  warpgroup_wait<0>();
  warpgroup_fence_operand(tSrS);
  smem.k_pipeline.release(k_state);  // the other release of this stage comes from the dQ warpgroup
  k_state.advance();
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    bool const last = i + 1 == steps;
    int const n = last_key_tile - i;
    copy(tSrS, tSrP);
    issue_dp(i);
    if (!last) smem.k_pipeline.wait_full(k_state);
    issue_s();  // after the last tile on stale data: the result is not used
    auto rF = make_tensor_like<cutlass::half_t>(tSrP);  // (MMA, MMA_M, MMA_N): derivatives of modified scores
    if constexpr (Traits::kVariant.modifies_scores) {
      cap_scores(tSrP, rF, params.score);
      add_bias(scores, coordinates(), tScS_0, head_slope(params.score, tile.batch, tile.head),
               first_row - n * kTileRows + tile.sequence.shift);
    }
    if (unsigned(n - whole_begin) >= unsigned(whole_size)) {
      Sequence const sequence = backward::read_band(tile.sequence);
      apply_mask(scores, coordinates(), tScS_0, sequence, first_row - n * kTileRows, sequence.len_k - n * kTileRows);
    }
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(row, j) = exp2_approx(scores(row, j) * params.scale_log2 - own.lse_log2[row]);
      }
    }
    if constexpr (Traits::kVariant.modifies_scores) {
      multiply_by_derivatives(tSrP, rF, params.score);
    }
    warpgroup_wait<2>();  // the first unit of dP
    smem.v_pipeline.release({0, i & 1});
    warpgroup_wait<1>();  // the second one
    warpgroup_fence_operand(tSrdP);
    smem.v_pipeline.release({1, i & 1});
    CUTE_UNROLL
    for (int row = 0; row < size<0>(dscores); ++row) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(dscores); ++j) {
        dscores(row, j) = scores(row, j) * (dscores(row, j) - own.delta[row]);
      }
    }
    convert(tSrdP, rdS);
    smem.ds_pipeline.wait_empty(at_step(i));  // the dQ warpgroup's four warps have read dS of two steps before
    store_fragment(smem.ds[i & 1], rdS);
    smem.ds_pipeline.arrive_full(at_step(i));
    warpgroup_wait<0>();  // S
    warpgroup_fence_operand(tSrS);
    if (!last) smem.k_pipeline.release(k_state);
    k_state.advance();
  }
}

// dQ += dS K.
template <class Traits>
CUTE_DEVICE void dq_consumer(KernelArgs const& args, typename Traits::QueriesStorage& smem) {
  BwdParams const& params = args.params;
  RowTileTask const volatile& tile = smem.tile;
  int const steps = key_steps(tile);
  Products<Traits> products;
  Operands const operands(smem);
  auto tdQrK = products.b_operand_of_sums(smem.k[0]);                        // (MMA, MMA_D, MMA_N)
  auto rdS = make_tensor_like<typename Traits::Element>(products.scores());  // (MMA, MMA_M, MMA_N)
  auto tdQrdS = make_tensor(rdS.data(), operand_a_layout_64(rdS.layout()));  // (MMA, MMA_M, MMA_K)
  auto tdQrdQ = products.sums();                                             // (MMA, MMA_M, MMA_D)
  clear(tdQrdQ);
  PipelineState<kStagesOfKeys> k_state;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    smem.ds_pipeline.wait_full(at_step(i));  // the other warpgroup's four warps have stored dS
    load_fragment(smem.ds[i & 1], rdS);
    smem.k_pipeline.wait_full(k_state);  // TMA: K has landed
    issue_gemm<Accumulate::kAdd>(products.mma_sums, tdQrdS, operands.at(tdQrK, smem.k[k_state.stage]), tdQrdQ);
    smem.ds_pipeline.release(at_step(i));
    warpgroup_wait<0>();
    warpgroup_fence_operand(tdQrdQ);
    smem.k_pipeline.release(k_state);
    k_state.advance();
  }
  Sequence const& sequence = smem.tile.sequence;
  store_sums<Traits>(args.dq, smem.q, 1, tdQrdQ, params.scale, tile.m_block * kTileRows, sequence.len_q, tile.head,
                     sequence_origin(params, smem.tile, sequence.first_row, sequence.rows));
}

// Grid: row tiles of all query heads.
template <class Traits>
  requires(Traits::kCtas == 1)
__global__ void __launch_bounds__(Traits::kThreads, 1) bwd_queries_kernel(__grid_constant__ KernelArgs const args) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::QueriesStorage*>(smem_raw);
  int const warpgroup = uniform(threadIdx.x / 128);

  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(&args.q);
    prefetch_tma_descriptor(&args.dout);
    prefetch_tma_descriptor(&args.k);
    prefetch_tma_descriptor(&args.v);
    find_row_tile(args.params, blockIdx.x, smem.tile);
    smem.rows_pipeline.init(8);
    smem.k_pipeline.init(8);
    smem.ds_pipeline.init(4, 4);
    smem.v_pipeline.init(4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes them visible to TMA
  }
  __syncthreads();  // thread 0 has written the tile and initialised the barriers
  if (smem.tile.m_block < 0) return;  // there are fewer tiles than CTAs

  if (warpgroup == 0) {
    lower_max_registers<Traits::kProducerRegs>();
    if (threadIdx.x == 0) load_rows_and_keys<Traits>(args, smem);
  } else if (warpgroup == 1) {
    raise_max_registers<Traits::kConsumerRegs>();
    scores_consumer<Traits>(args, smem);
  } else {
    raise_max_registers<Traits::kConsumerRegs>();
    dq_consumer<Traits>(args, smem);
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
