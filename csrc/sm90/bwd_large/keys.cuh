// dK and dV. A cluster owns 64 keys, each of its CTAs a part of the columns of K, V, Q, dO, dK and dV, and loops over
// the row tiles of all query heads that read the keys. One warpgroup computes S^T and dV, the other dP^T and dK:
//
//     warpgroup 0 | P^T(m)   to smem | S^T(m+1) = K Q^T, exchange of its parts under dV += P^T(m) dO
//     warpgroup 1 | dS^T(m) from P^T | dP^T(m+1) = V dO^T, exchange of its parts under dK += dS^T(m) Q
//
// The two are half a step apart, since dS^T needs P^T. One thread of a third warpgroup issues all loads.
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

// Statistics in the order of the rows, as the thread's columns of S^T have them: 2q, 2q + 1, 8 + 2q and 9 + 2q of every
// 16 for thread q of a quad.
CUTE_DEVICE RowStats<kTileRows> read_statistics(float const* statistics) {
  float const* const own = statistics + fresh_lane_index() % 4 * 2;
  RowStats<kTileRows> result;
  CUTE_UNROLL
  for (int i = 0; i < kTileRows / 16; ++i) {
    float2 const low = *reinterpret_cast<float2 const*>(own + 16 * i);
    float2 const high = *reinterpret_cast<float2 const*>(own + 16 * i + 8);
    result.fours[i] = {low.x, low.y, high.x, high.y};
  }
  return result;
}

CUTE_DEVICE int row_steps(BwdParams const& params, KeyTile const volatile& tile) {
  return params.group * (uniform(tile.row_tiles.end) - uniform(tile.row_tiles.begin));
}

// The coordinates of dK's and dV's rows.
CUTE_DEVICE SequenceOrigin origin_of_gradients(BwdParams const& params, KeyTile const& tile) {
  return origin_in(params, tile, tile.sequence.first_key, tile.keys);
}

// P^T = exp(scale K Q^T - lse), dV += P^T dO.
template <class Traits>
CUTE_DEVICE void dv_consumer(KernelArgs const& args, typename Traits::KeysStorage& smem) {
  using Element = typename Traits::Element;
  BwdParams const& params = args.params;
  KeyTile const volatile& tile = smem.tile;
  int const steps = row_steps(params, tile);
  int const whole_begin = uniform(tile.row_tiles.whole_begin);  // row tiles that need no mask
  int const whole_size = uniform(tile.row_tiles.whole_end) - whole_begin;
  Products<Traits> products;
  Operands const operands(smem);
  Exchange<Traits::kCtas> const exchange{smem.parts_of_s, smem.exchange_of_s};
  auto tSrK = products.a_operand(smem.k);                  // (MMA, MMA_N, MMA_D)
  auto tSrQ = products.b_operand(smem.q[0]);               // (MMA, MMA_M, MMA_D)
  auto tdVrdO = products.b_operand_of_sums(smem.dout[0]);  // (MMA, MMA_D, MMA_M)
  auto tSrS = products.scores();                           // (MMA, MMA_N, MMA_M)
  auto scores = rowcol_view(tSrS);                         // (keys, rows)
  auto rP = make_tensor_like<Element>(tSrS);               // (MMA, MMA_N, MMA_M)
  auto tdVrP = make_tensor(rP.data(), operand_a_layout_64(rP.layout()));  // (MMA, MMA_N, MMA_K)
  auto tdVrdV = products.sums();                                          // (MMA, MMA_N, MMA_D)
  auto cS = make_identity_tensor(Shape<_64, _64>{});                      // (keys, rows) -> (key, row)
  auto tScS_0 = rowcol_view(products.mma_scores.get_slice(_0{}).partition_C(cS));  // the same of thread 0, static
  auto const coordinates = [&] {
    return rowcol_view(products.mma_scores.get_slice(fresh_thread_index() % 128).partition_C(cS));
  };

  auto issue_scores = [&](int stage) __attribute__((always_inline)) {
    auto tSrK_now = operands.at(tSrK, smem.k);  // (MMA, MMA_N, MMA_D)
    issue_gemm<Accumulate::kOverwrite>(products.mma_scores, tSrK_now, operands.at(tSrQ, smem.q[stage]), tSrS);
  };
  clear(tdVrdV);
  if (steps > 0) {
    smem.k_pipeline.wait_full({});  // TMA: K has landed
    smem.q_pipeline.wait_full({});  // TMA: Q and lse_log2 have landed
    issue_scores(0);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrS);
    exchange.send(tSrS, 0);
  }
  RowTile row_tile{uniform(tile.first.m_block)};
  PipelineState<Traits::kStagesOfRows> state;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    bool const last = i + 1 == steps;
    int const m = row_tile.m_block;
    RowStats<kTileRows> const lse_log2 = read_statistics(smem.lse_log2[state.stage]);
    exchange.complete(tSrS, i);
    auto rF = make_tensor_like<cutlass::half_t>(tSrS);  // (MMA, MMA_N, MMA_M): derivatives of modified scores
    if constexpr (Traits::kVariant == Variant::kModified) {
      float const slope = head_slope(params.score, tile.batch, tile.head_kv * params.group + row_tile.head);
      cap_scores(tSrS, rF, params.score);
      add_bias_transposed(scores, coordinates(), tScS_0, slope,
                          (m - tile.n_block) * kTileRows + bwd::read_band(tile.sequence).shift);
    }
    if (unsigned(m - whole_begin) >= unsigned(whole_size)) {
      apply_mask_transposed(scores, coordinates(), tScS_0, bwd::read_band(tile.sequence), m * kTileRows,
                            tile.n_block * kTileRows);
    }
    exponentiate(scores, lse_log2, params.scale_log2);
    __syncwarp();  // all lanes have read the statistics
    smem.q_pipeline.release(state);  // the other release of this stage comes from the dK warpgroup
    convert(tSrS, rP);
    auto rGiven = make_tensor_like<Element>(tSrS);  // (MMA, MMA_N, MMA_M): for the dK warpgroup
    if constexpr (Traits::kVariant == Variant::kModified) {
      multiply_by_derivatives(tSrS, rF, params.score);
      convert(tSrS, rGiven);
    } else {
      rGiven = rP;
    }
    // The dK warpgroup has read P^T of the step before: it has allowed the other CTA to send what is complete now.
    store_to_parts(smem.parts_of_s, rGiven);
    smem.p_pipeline.arrive_full({0, i & 1});

    auto next = state;
    next.advance();
    if (!last) smem.q_pipeline.wait_full(next);
    issue_scores(next.stage);  // after the last tile on stale data: the result is not used
    smem.dout_pipeline.wait_full(state);  // TMA: dO has landed
    issue_gemm<Accumulate::kAdd>(products.mma_sums, tdVrP, operands.at(tdVrdO, smem.dout[state.stage]), tdVrdV);
    warpgroup_wait<1>();  // S^T
    warpgroup_fence_operand(tSrS);
    if (!last) exchange.send(tSrS, i + 1);
    warpgroup_wait<0>();  // dV
    warpgroup_fence_operand(tdVrdV);
    smem.dout_pipeline.release(state);
    state = next;
    row_tile.advance(params.group, tile);
  }
  int const first_key = tile.n_block * kTileRows;
  store_sums<Traits>(args.dv, smem.k, 0, tdVrdV, 1.f, first_key, tile.sequence.len_k, tile.head_kv,
                     origin_of_gradients(params, smem.tile));
}

// dS^T = P^T (V dO^T - delta), dK += dS^T Q.
template <class Traits>
CUTE_DEVICE void dk_consumer(KernelArgs const& args, typename Traits::KeysStorage& smem) {
  using Element = typename Traits::Element;
  BwdParams const& params = args.params;
  KeyTile const volatile& tile = smem.tile;
  int const steps = row_steps(params, tile);
  Products<Traits> products;
  Operands const operands(smem);
  Exchange<Traits::kCtas> const exchange{smem.parts_of_dp, smem.exchange_of_dp};
  Exchange<Traits::kCtas> const exchange_of_s{smem.parts_of_s, smem.exchange_of_s};
  auto tSrV = products.a_operand(smem.v);              // (MMA, MMA_N, MMA_D)
  auto tSrdO = products.b_operand(smem.dout[0]);       // (MMA, MMA_M, MMA_D)
  auto tdKrQ = products.b_operand_of_sums(smem.q[0]);  // (MMA, MMA_D, MMA_M)
  auto tSrdP = products.scores();                      // (MMA, MMA_N, MMA_M)
  auto dscores = rowcol_view(tSrdP);                   // (keys, rows)
  auto rP = make_tensor_like<Element>(tSrdP);          // (MMA, MMA_N, MMA_M)
  auto rdS = make_tensor_like<Element>(tSrdP);         // (MMA, MMA_N, MMA_M)
  auto tdKrdS = make_tensor(rdS.data(), operand_a_layout_64(rdS.layout()));  // (MMA, MMA_N, MMA_K)
  auto tdKrdK = products.sums();                                             // (MMA, MMA_N, MMA_D)

  auto issue_dscores = [&](int stage) __attribute__((always_inline)) {
    auto tSrV_now = operands.at(tSrV, smem.v);  // (MMA, MMA_N, MMA_D)
    issue_gemm<Accumulate::kOverwrite>(products.mma_scores, tSrV_now, operands.at(tSrdO, smem.dout[stage]), tSrdP);
  };
  clear(tdKrdK);
  if (steps > 0) {
    smem.v_pipeline.wait_full({});     // TMA: V has landed
    smem.dout_pipeline.wait_full({});  // TMA: dO and delta have landed
    issue_dscores(0);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrdP);
    exchange.send(tSrdP, 0);
  }
  PipelineState<Traits::kStagesOfRows> state;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    bool const last = i + 1 == steps;
    RowStats<kTileRows> const delta = read_statistics(smem.delta[state.stage]);
    exchange.release(exchange.complete(tSrdP, i));
    smem.p_pipeline.wait_full({0, i & 1});  // the dV warpgroup's four warps have stored P^T
    exchange_of_s.release(load_from_parts(smem.parts_of_s, rP));
    differentiate(rP, dscores, delta);
    __syncwarp();  // all lanes have read the statistics
    smem.dout_pipeline.release(state);
    convert(tSrdP, rdS);

    auto next = state;
    next.advance();
    if (!last) smem.dout_pipeline.wait_full(next);
    issue_dscores(next.stage);  // after the last tile on stale data: the result is not used
    smem.q_pipeline.wait_full(state);  // TMA: Q has landed
    issue_gemm<Accumulate::kAdd>(products.mma_sums, tdKrdS, operands.at(tdKrQ, smem.q[state.stage]), tdKrdK);
    warpgroup_wait<1>();  // dP^T
    warpgroup_fence_operand(tSrdP);
    if (!last) exchange.send(tSrdP, i + 1);
    warpgroup_wait<0>();  // dK
    warpgroup_fence_operand(tdKrdK);
    smem.q_pipeline.release(state);
    state = next;
  }
  int const first_key = tile.n_block * kTileRows;
  store_sums<Traits>(args.dk, smem.v, 1, tdKrdK, params.scale, first_key, tile.sequence.len_k, tile.head_kv,
                     origin_of_gradients(params, smem.tile));
}

// Grid: (key tiles of all KV heads x CTAs per tile), in clusters.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) bwd_keys_kernel(__grid_constant__ KernelArgs const args) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::KeysStorage*>(smem_raw);
  int const warpgroup = uniform(threadIdx.x / 128);

  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(&args.q);
    prefetch_tma_descriptor(&args.dout);
    prefetch_tma_descriptor(&args.k);
    prefetch_tma_descriptor(&args.v);
    find_key_tile(args.params, blockIdx.x / Traits::kCtas, smem.tile);
    smem.exchange_of_s.init();
    smem.exchange_of_dp.init();
    smem.k_pipeline.init(8);
    smem.v_pipeline.init(8);
    smem.q_pipeline.init(8);
    smem.dout_pipeline.init(8);
    smem.p_pipeline.init(4, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes them visible to TMA and the cluster
  }
  cluster_sync();  // the CTAs' threads 0 have written the tile and initialised the barriers
  if (smem.tile.n_block < 0) return;  // there are fewer tiles than clusters

  if (warpgroup == 0) {
    lower_max_registers<Traits::kProducerRegs>();
    if (threadIdx.x == 0) load_keys_and_rows<Traits>(args, smem);
  } else if (warpgroup == 1) {
    raise_max_registers<Traits::kConsumerRegs>();
    dv_consumer<Traits>(args, smem);
  } else {
    raise_max_registers<Traits::kConsumerRegs>();
    dk_consumer<Traits>(args, smem);
  }
  __syncwarp();
  cluster_sync();  // a CTA's shared memory must not be gone before the other ones' last arrivals
}

}  // namespace flash_cute::sm90::bwd_large
