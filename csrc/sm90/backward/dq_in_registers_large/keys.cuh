// dK and dV for head dims 257 to 320. A CTA owns 64 keys and loops over the row tiles of all query heads that read
// them. One warpgroup computes S^T and dV, the other dP^T and dK:
//
//     dV's warpgroup | P^T(i)   to smem | dV += P^T(i) dO , S^T(i+1) = K Q^T
//     dK's warpgroup | dS^T(i) from P^T | dK += dS^T(i) Q , dP^T(i+1) = V dO^T
//
// The two are half a step apart, since dS^T needs P^T. A warpgroup waits for each product before it issues the next
// one, for which the sums leave no registers; the other one's products run then. Shared memory has room for one tile of
// dO: it is free as soon as dV is summed, and its successor arrives while S^T and dK are computed. One thread of a
// third warpgroup issues all loads.
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
  auto tSrK = products.a_operand(smem.k);                  // (MMA, MMA_N, MMA_D)
  auto tSrQ = products.b_operand(smem.q[0]);               // (MMA, MMA_M, MMA_D)
  auto tdVrdO = products.b_operand_of_sums(smem.dout);     // (MMA, MMA_D, MMA_M)
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

  PipelineState<kStagesOfQ> q_state;
  auto compute_scores = [&] __attribute__((always_inline)) {
    smem.q_pipeline.wait_full(q_state);         // TMA: Q and lse_log2 have landed
    auto tSrK_now = operands.at(tSrK, smem.k);  // (MMA, MMA_N, MMA_D)
    issue_gemm<Accumulate::kOverwrite>(products.mma_scores, tSrK_now, operands.at(tSrQ, smem.q[q_state.stage]), tSrS);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrS);
  };
  clear(tdVrdV);
  if (steps > 0) {
    smem.k_pipeline.wait_full({});  // TMA: K has landed
    compute_scores();
  }
  RowTile row_tile{uniform(tile.first.m_block)};
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    int const m = row_tile.m_block;
    RowStats<kTileRows> const lse_log2 = read_statistics(smem.lse_log2[q_state.stage]);
    auto rF = make_tensor_like<cutlass::half_t>(tSrS);  // (MMA, MMA_N, MMA_M): derivatives of modified scores
    if constexpr (Traits::kVariant.modifies_scores) {
      float const slope = head_slope(params.score, tile.batch, tile.head_kv * params.heads_per_kv + row_tile.head);
      cap_scores(tSrS, rF, params.score);
      add_bias_transposed(scores, coordinates(), tScS_0, slope,
                          (m - tile.n_block) * kTileRows + backward::read_band(tile.sequence).shift);
    }
    if (unsigned(m - whole_begin) >= unsigned(whole_size)) {
      apply_mask_transposed(scores, coordinates(), tScS_0, backward::read_band(tile.sequence), m * kTileRows,
                            tile.n_block * kTileRows);
    }
    exponentiate(scores, lse_log2, params.scale_log2);
    __syncwarp();  // all lanes have read the statistics
    smem.q_pipeline.release(q_state);  // the other release of this stage comes from the dK warpgroup
    convert(tSrS, rP);
    smem.p_pipeline.wait_empty(at_step(i));  // the dK warpgroup's four warps have read P^T of two steps before
    if constexpr (Traits::kVariant.modifies_scores) {
      multiply_by_derivatives(tSrS, rF, params.score);
      auto rGiven = make_tensor_like<Element>(tSrS);  // (MMA, MMA_N, MMA_M): for the dK warpgroup
      convert(tSrS, rGiven);
      store_fragment(smem.p[i & 1], rGiven);
    } else {
      store_fragment(smem.p[i & 1], rP);
    }
    smem.p_pipeline.arrive_full(at_step(i));

    smem.dout_pipeline.wait_full({0, i & 1});  // TMA: the first unit of dO has landed
    auto tdVrdO_now = operands.at(tdVrdO, smem.dout);  // (MMA, MMA_D, MMA_M)
    issue_sums_of_unit<Traits, 0>(products.mma_sums, tdVrP, tdVrdO_now, tdVrdV);
    smem.dout_pipeline.wait_full({1, i & 1});  // the second one
    issue_sums_of_unit<Traits, 1>(products.mma_sums, tdVrP, tdVrdO_now, tdVrdV);
    warpgroup_wait<1>();
    smem.dout_pipeline.release({0, i & 1});
    warpgroup_wait<0>();
    warpgroup_fence_operand(tdVrdV);
    warpgroup_fence_operand(tdVrP);
    smem.dout_pipeline.release({1, i & 1});
    q_state.advance();
    if (i + 1 < steps) compute_scores();
    row_tile.advance(params.heads_per_kv, tile);
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
  auto tSrV = products.a_operand(smem.v);              // (MMA, MMA_N, MMA_D)
  auto tSrdO = products.b_operand(smem.dout);          // (MMA, MMA_M, MMA_D)
  auto tdKrQ = products.b_operand_of_sums(smem.q[0]);  // (MMA, MMA_D, MMA_M)
  auto tSrdP = products.scores();                      // (MMA, MMA_N, MMA_M): dP^T - delta
  auto rP = make_tensor_like<Element>(tSrdP);          // (MMA, MMA_N, MMA_M)
  auto rdS = make_tensor_like<Element>(tSrdP);         // (MMA, MMA_N, MMA_M)
  auto tdKrdS = make_tensor(rdS.data(), operand_a_layout_64(rdS.layout()));  // (MMA, MMA_N, MMA_K)
  auto tdKrdK = products.sums();                                             // (MMA, MMA_N, MMA_D)

  // The product is added to -delta, so that delta has no registers beside P^T, dP^T and the sums.
  auto compute_dscores = [&](int step) __attribute__((always_inline)) {
    smem.dout_pipeline.wait_full({0, step & 1});  // TMA: delta and the first unit of dO have landed
    backward::set_to_negative(rowcol_view(tSrdP), read_statistics(smem.delta));
    auto tSrV_now = operands.at(tSrV, smem.v);       // (MMA, MMA_N, MMA_D)
    auto tSrdO_now = operands.at(tSrdO, smem.dout);  // (MMA, MMA_M, MMA_D)
    issue_scores_of_unit<Traits, Accumulate::kAdd, 0>(products.mma_scores, tSrV_now, tSrdO_now, tSrdP);
    smem.dout_pipeline.wait_full({1, step & 1});  // the second one
    issue_scores_of_unit<Traits, Accumulate::kAdd, 1>(products.mma_scores, tSrV_now, tSrdO_now, tSrdP);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrdP);
    smem.dout_pipeline.release({0, step & 1});  // the other releases come from the dV warpgroup
    smem.dout_pipeline.release({1, step & 1});
  };
  clear(tdKrdK);
  PipelineState<kStagesOfQ> q_state;
  if (steps > 0) {
    smem.v_pipeline.wait_full({});  // TMA: V has landed
    compute_dscores(0);
  }
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    smem.p_pipeline.wait_full(at_step(i));  // the dV warpgroup's four warps have stored P^T
    load_fragment(smem.p[i & 1], rP);
    differentiate(rP, tSrdP);
    __syncwarp();  // all lanes have read P^T
    smem.p_pipeline.release(at_step(i));
    convert(tSrdP, rdS);

    smem.q_pipeline.wait_full(q_state);  // TMA: Q has landed
    issue_gemm<Accumulate::kAdd>(products.mma_sums, tdKrdS, operands.at(tdKrQ, smem.q[q_state.stage]), tdKrdK);
    // Q is released before the wait for dO, which follows the dV warpgroup's last use of the buffer.
    warpgroup_wait<0>();
    warpgroup_fence_operand(tdKrdK);
    smem.q_pipeline.release(q_state);
    q_state.advance();
    if (i + 1 < steps) compute_dscores(i + 1);
  }
  int const first_key = tile.n_block * kTileRows;
  store_sums<Traits>(args.dk, smem.v, 1, tdKrdK, params.scale, first_key, tile.sequence.len_k, tile.head_kv,
                     origin_of_gradients(params, smem.tile));
}

// Grid: key tiles of all KV heads.
template <class Traits>
  requires(Traits::kCtas == 1)
__global__ void __launch_bounds__(Traits::kThreads, 1) bwd_keys_kernel(__grid_constant__ KernelArgs const args) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::KeysStorage*>(smem_raw);
  int const warpgroup = uniform(threadIdx.x / 128);

  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(&args.q);
    prefetch_tma_descriptor(&args.dout);
    prefetch_tma_descriptor(&args.k);
    prefetch_tma_descriptor(&args.v);
    find_key_tile(args.params, blockIdx.x, smem.tile);
    smem.k_pipeline.init(8);
    smem.p_pipeline.init(4, 4);
    smem.v_pipeline.init(8);
    smem.q_pipeline.init(8);
    smem.dout_pipeline.init(8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes them visible to TMA
  }
  __syncthreads();  // thread 0 has written the tile and initialised the barriers
  if (smem.tile.n_block < 0) return;  // there are fewer tiles than CTAs

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
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
