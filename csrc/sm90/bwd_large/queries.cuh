// dQ. A cluster owns 64 query rows, each of its CTAs a part of the columns of Q, dO, K, V and dQ, and loops over the
// key tiles that the rows see, from the last to the first. One warpgroup computes S, dP and dS, the other sums dQ:
//
//     warpgroup 0 | P(n), S(n-1) = Q K^T issued, exchange of its parts | dS(n) to smem, dP(n-1) = dO V^T issued, ...
//     warpgroup 1 | dQ += dS(n+1) K(n+1)                               | dQ += dS(n) K(n)
//
// The sums leave no room for the scores of two tiles, which hide the exchange. One thread of a third warpgroup issues
// all loads.
#pragma once

#include <cute/tensor.hpp>

#include "../../core/convert.cuh"
#include "../../core/layout.cuh"
#include "../../core/mask.cuh"
#include "../../core/registers.cuh"
#include "../bwd/read_sequence.cuh"
#include "../warpgroup.cuh"
#include "epilogue.cuh"
#include "load.cuh"
#include "scores.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::bwd_large {

CUTE_DEVICE int key_steps(RowTileTask const volatile& tile) {
  return uniform(tile.key_tiles.end) - uniform(tile.key_tiles.begin);
}

// The statistics of a thread's two rows.
struct OwnStatistics {
  float lse_log2[2];
  float delta[2];

  CUTE_DEVICE OwnStatistics(BwdParams const& params, RowTileTask const& tile) {
    int64_t const first = first_statistic(params, tile.head, tile.first_row_tile, tile.m_block);
    int const row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      lse_log2[i] = params.lse_log2[first + row + 8 * i];
      delta[i] = params.delta[first + row + 8 * i];
    }
  }
};

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
  Exchange<Traits::kCtas> const exchange_s{smem.parts_of_s, smem.exchange_of_s};
  Exchange<Traits::kCtas> const exchange_dp{smem.parts_of_dp, smem.exchange_of_dp};
  auto tSrQ = products.a_operand(smem.q);       // (MMA, MMA_M, MMA_D)
  auto tSrdO = products.a_operand(smem.dout);   // (MMA, MMA_M, MMA_D)
  auto tSrK = products.b_operand(smem.k[0]);    // (MMA, MMA_N, MMA_D)
  auto tSrV = products.b_operand(smem.v[0]);    // (MMA, MMA_N, MMA_D)
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

  PipelineState<Traits::kStagesOfKeys> k_state;
  PipelineState<Traits::kStagesOfValues> v_state;
  auto issue_s = [&] __attribute__((always_inline)) {
    auto tSrQ_now = operands.at(tSrQ, smem.q);  // (MMA, MMA_M, MMA_D)
    issue_gemm<Accumulate::kOverwrite>(products.mma_scores, tSrQ_now, operands.at(tSrK, smem.k[k_state.stage]), tSrS);
  };
  auto issue_dp = [&] __attribute__((always_inline)) {
    auto tSrdO_now = operands.at(tSrdO, smem.dout);  // (MMA, MMA_M, MMA_D)
    issue_gemm<Accumulate::kOverwrite>(products.mma_scores, tSrdO_now, operands.at(tSrV, smem.v[v_state.stage]), tSrdP);
  };
  // When S and dP of a step are done, in this order, their parts are sent. `last`: there was no such step.
  auto finish = [&](int step, bool last) __attribute__((always_inline)) {
    warpgroup_wait<1>();  // S
    warpgroup_fence_operand(tSrS);
    if (!last) {
      smem.k_pipeline.release(k_state);  // the other release of this stage comes from the dQ warpgroup
      exchange_s.send(tSrS, step);
    }
    warpgroup_wait<0>();  // dP
    warpgroup_fence_operand(tSrdP);
    if (step > 0) smem.turn_pipeline.arrive_full(at_step(step - 1));
    if (!last) {
      smem.v_pipeline.release(v_state);
      exchange_dp.send(tSrdP, step);
    }
    k_state.advance();
    v_state.advance();
  };
  smem.rows_pipeline.wait_full({});   // TMA: Q and dO have landed
  smem.k_pipeline.wait_full(k_state);  // TMA: K has landed
  issue_s();
  smem.v_pipeline.wait_full(v_state);  // TMA: V has landed
  issue_dp();
  finish(0, false);
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    bool const last = i + 1 == steps;
    int const n = last_key_tile - i;
    exchange_s.release(exchange_s.complete(tSrS, i));
    copy(tSrS, tSrP);
    auto rF = make_tensor_like<cutlass::half_t>(tSrP);  // (MMA, MMA_M, MMA_N): derivatives of modified scores
    if (!last) smem.k_pipeline.wait_full(k_state);
    issue_s();  // after the last tile on stale data: the result is not used
    if constexpr (Traits::kVariant == Variant::kModified) {
      cap_scores(tSrP, rF, params.score);
      add_bias(scores, coordinates(), tScS_0, head_slope(params.score, tile.batch, tile.head),
               first_row - n * kTileRows + tile.sequence.shift);
    }
    if (unsigned(n - whole_begin) >= unsigned(whole_size)) {
      Sequence const sequence = bwd::read_band(tile.sequence);
      apply_mask(scores, coordinates(), tScS_0, sequence, first_row - n * kTileRows, sequence.len_k - n * kTileRows);
    }
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(row, j) = exp2_approx(scores(row, j) * params.scale_log2 - own.lse_log2[row]);
      }
    }
    if constexpr (Traits::kVariant == Variant::kModified) {
      multiply_by_derivatives(tSrP, rF, params.score);
    }
    exchange_dp.complete(tSrdP, i);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(dscores); ++row) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(dscores); ++j) {
        dscores(row, j) = scores(row, j) * (dscores(row, j) - own.delta[row]);
      }
    }
    convert(tSrdP, rdS);
    // The dQ warpgroup has read dS of the step before: it has allowed the other CTA to send what is complete now.
    store_to_parts(smem.parts_of_dp, rdS);
    smem.ds_pipeline.arrive_full({0, i & 1});
    if (!last) smem.v_pipeline.wait_full(v_state);
    issue_dp();
    finish(i + 1, last);
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
  Exchange<Traits::kCtas> const exchange_dp{smem.parts_of_dp, smem.exchange_of_dp};
  auto tdQrK = products.b_operand_of_sums(smem.k[0]);                                // (MMA, MMA_D, MMA_N)
  auto rdS = make_tensor_like<typename Traits::Element>(products.scores());          // (MMA, MMA_M, MMA_N)
  auto tdQrdS = make_tensor(rdS.data(), operand_a_layout_64(rdS.layout()));          // (MMA, MMA_M, MMA_K)
  auto tdQrdQ = products.sums();                                                     // (MMA, MMA_M, MMA_D)
  clear(tdQrdQ);
  PipelineState<Traits::kStagesOfKeys> k_state;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    smem.ds_pipeline.wait_full({0, i & 1});  // the other warpgroup's four warps have stored dS
    exchange_dp.release(load_from_parts(smem.parts_of_dp, rdS));
    smem.k_pipeline.wait_full(k_state);  // TMA: K has landed
    // dP of the next step, whose part the other CTA waits for, has had the tensor cores first.
    smem.turn_pipeline.wait_full(at_step(i));
    issue_gemm<Accumulate::kAdd>(products.mma_sums, tdQrdS, operands.at(tdQrK, smem.k[k_state.stage]), tdQrdQ);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tdQrdQ);
    smem.k_pipeline.release(k_state);
    k_state.advance();
  }
  Sequence const& sequence = smem.tile.sequence;
  store_sums<Traits>(args.dq, smem.q, 1, tdQrdQ, params.scale, tile.m_block * kTileRows, sequence.len_q, tile.head,
                     origin_in(params, smem.tile, sequence.first_row, sequence.rows));
}

// Grid: (row tiles of all query heads x CTAs per tile), in clusters.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) bwd_queries_kernel(__grid_constant__ KernelArgs const args) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::QueriesStorage*>(smem_raw);
  int const warpgroup = uniform(threadIdx.x / 128);

  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(&args.q);
    prefetch_tma_descriptor(&args.dout);
    prefetch_tma_descriptor(&args.k);
    prefetch_tma_descriptor(&args.v);
    find_row_tile(args.params, blockIdx.x / Traits::kCtas, smem.tile);
    smem.exchange_of_s.init();
    smem.exchange_of_dp.init();
    smem.rows_pipeline.init(8);
    smem.k_pipeline.init(8);
    smem.v_pipeline.init(4);
    smem.ds_pipeline.init(4, 4);
    smem.turn_pipeline.init(4, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes them visible to TMA and the cluster
  }
  cluster_sync();  // the CTAs' threads 0 have written the tile and initialised the barriers
  if (smem.tile.m_block < 0) return;  // there are fewer tiles than clusters

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
  __syncwarp();
  cluster_sync();  // a CTA's shared memory must not be gone before the other ones' last arrivals
}

}  // namespace flash_cute::sm90::bwd_large
