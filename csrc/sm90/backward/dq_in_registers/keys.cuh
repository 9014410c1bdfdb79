// dK and dV for head dims above 128. A CTA owns 64 keys and loops over the row tiles of all query heads that read them.
// A warpgroup's registers hold only one of the two accumulators, so that one computes P^T and dV, the other dS^T and
// dK. In step i, whose row tiles come from the last to the first:
//
//     warpgroup 1, dv_consumer | P^T(i)   to smem | dV += P^T(i) dO , S^T(i+1) = K Q^T
//     warpgroup 2, dk_consumer | dS^T(i) from P^T | dK += dS^T(i) Q , dP^T(i+1) = V dO^T
//
// The two are half a step apart, since dS^T needs P^T. One thread of warpgroup 0 issues all loads.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "core/mask.cuh"
#include "sm90/backward/common/load.cuh"
#include "sm90/backward/common/modified_scores.cuh"
#include "sm90/backward/common/place.cuh"
#include "sm90/backward/common/scores.cuh"
#include "sm90/backward/common/tile_columns.cuh"
#include "epilogue.cuh"
#include "traits.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::backward::dq_in_registers {

using backward::RowStats;
using backward::differentiate;
using backward::exponentiate;
using backward::load_key_tile;

// The row tiles of a key tile.
CUTE_DEVICE TileRange row_range_of(BwdParams const& params, KeyTile const volatile& tile) {
  return row_range<64, 64>(params, tile.n_block);
}
CUTE_DEVICE TileRange row_range_of(BwdParams const&, backward::SequenceKeyTile const volatile& tile) {
  TileRange range = row_range<64, 64>(backward::read_uniform(tile.sequence), uniform(tile.n_block));
  if (uniform(tile.begin) == uniform(tile.end)) range.end = range.begin;  // keys that are not used
  return range;
}

// With a mask: as many, whose numbers the producer tells.
CUTE_DEVICE TileRange row_range_of(BwdParams const& params, MaskedKeyTile const volatile& tile) {
  return {.end = uniform(tile.end) / params.heads_per_kv};
}

// Finds the CTA's key tile; n_block is -1 where there are fewer tiles than CTAs.
template <class Traits>
CUTE_DEVICE void find_key_tile(KernelArgs const& args, KeyTile& tile) {
  KeyTile::make<Traits>(args, blockIdx.x / args.params.n_blocks, blockIdx.x % args.params.n_blocks, tile);
}
template <class Traits>
CUTE_DEVICE void find_key_tile(KernelArgs const& args, MaskedKeyTile& tile) {
  find_key_tile<Traits>(args, static_cast<KeyTile&>(tile));
  MaskedRows::find<Traits>(args.params, tile);
}
template <class Traits>
CUTE_DEVICE void find_key_tile(KernelArgs const& args, backward::SequenceKeyTile& tile) {
  tile.n_block = -1;
  backward::SequenceKeyTile::make<Traits>(args, blockIdx.x, tile);
}

// What the two roles have in common: the fragments' types, and the loop over row tiles. The scores are summed over
// kScoreColumns columns; the accumulator has kSumColumns.
template <class Traits, int kScoreColumns, int kSumColumns>
struct KeysRole {
  using Element = typename Traits::Element;
  KernelArgs const& args;
  typename Traits::KeysStorage& smem;
  typename Traits::MmaScores mma_scores;
  typename Traits::template MmaSums<kSumColumns> mma_sums;

  CUTE_DEVICE auto a_operand(Element* buffer) const {
    auto sX = make_tensor(make_smem_ptr(buffer), typename Traits::template SmemLayout<kScoreColumns>{});  // (64, D)
    return mma_scores.get_slice(0).partition_fragment_A(sX);  // (MMA, MMA_M, MMA_D)
  }
  CUTE_DEVICE auto b_operand(Element* buffer) const {
    auto sX = make_tensor(make_smem_ptr(buffer), typename Traits::template SmemLayout<kScoreColumns>{});  // (64, D)
    return mma_scores.get_slice(0).partition_fragment_B(sX);  // (MMA, MMA_N, MMA_D)
  }
  CUTE_DEVICE auto b_operand_of_sums(Element* buffer) const {
    auto sXt = make_tensor(make_smem_ptr(buffer), typename Traits::template SmemLayoutT<kSumColumns>{});  // (D, 64)
    return mma_sums.get_slice(0).partition_fragment_B(sXt);  // (MMA, MMA_D, MMA_K)
  }
  CUTE_DEVICE auto scores() const {
    return partition_fragment_C(mma_scores, Shape<_64, _64>{});  // (MMA, MMA_N, MMA_M)
  }
  CUTE_DEVICE auto sums() const {
    return partition_fragment_C(mma_sums, Shape<_64, Int<kSumColumns>>{});  // (MMA, MMA_N, MMA_D)
  }

  // Calls step(m, i, last, head) for the i-th row tile, m of head number `head` of the group.
  template <class Step>
  CUTE_DEVICE void for_each_row_tile(TileRange range, Step&& step) const {
    int const steps = args.params.heads_per_kv * (range.end - range.begin);
    // Read once: the next step's exponentials would wait for a read at the end of each.
    bool const alternating = smem.tile.last_row_tile < 0;
    RowTile row_tile{range.end - 1};
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      step(row_tile.m_block, i, i + 1 == steps, row_tile.head);
      if (alternating) {
        row_tile.advance(args.params.heads_per_kv);
      } else {
        row_tile.advance(args.params.heads_per_kv, smem.tile);
      }
    }
  }
};

// P^T = exp(scale K Q^T - lse), dV += P^T dO.
template <class Traits>
CUTE_DEVICE void dv_consumer(KernelArgs const& args, typename Traits::KeysStorage& smem) {
  using Element = typename Traits::Element;
  constexpr bool kModified = Traits::kVariant.modifies_scores;
  BwdParams const& params = args.params;
  typename Traits::Tile const volatile& tile = smem.tile;
  TileRange const range = row_range_of(params, tile);
  auto const lengths = [&]() -> decltype(auto) { return backward::lengths_of(params, tile); };
  auto const shift = [&] { return backward::shift_of(params, tile); };
  KeysRole<Traits, Traits::kHeadDim, Traits::kHeadDimV> role{args, smem};
  Operands const operands(smem);
  auto tSrK = role.a_operand(smem.k);                  // (MMA, MMA_N, MMA_D)
  auto tSrQ = role.b_operand(smem.q[0]);               // (MMA, MMA_M, MMA_D)
  auto tdVrdO = role.b_operand_of_sums(smem.dout[0]);  // (MMA, MMA_D, MMA_M)
  RowStats<64> lse_log2;                               // of the row tile whose scores are in flight
  auto tSrS = role.scores();                           // (MMA, MMA_N, MMA_M)
  auto scores = rowcol_view(tSrS);                     // (keys, rows)
  auto rP = make_tensor_like<Element>(tSrS);           // (MMA, MMA_N, MMA_M)
  auto tdVrP = make_tensor(rP.data(), operand_a_layout_64(rP.layout()));  // (MMA, MMA_N, MMA_K)
  auto tdVrdV = role.sums();                                              // (MMA, MMA_N, MMA_D)
  auto cS = make_identity_tensor(Shape<_64, _64>{});                           // (BLK_N, BLK_M) -> (key, row)
  auto tScS_0 = rowcol_view(role.mma_scores.get_slice(_0{}).partition_C(cS));  // (keys, rows) -> (key, row) of thread 0

  auto issue_scores = [&](int i) __attribute__((always_inline)) {
    auto tSrK_now = operands.at(tSrK, smem.k);  // (MMA, MMA_N, MMA_D)
    issue_gemm<Accumulate::kOverwrite>(role.mma_scores, tSrK_now, operands.at(tSrQ, smem.q[i & 1]), tSrS);
  };
  [[maybe_unused]] float slope_log2 = 0.f;  // of query head number `slope_head` of the group
  [[maybe_unused]] int slope_head = -1;
  backward::Reach reach = backward::Reach::kAny;  // of a softcap's scores, by the row tile's log-sum-exps
  auto read_lse = [&](int stage) __attribute__((always_inline)) {
    if constexpr (!kModified) {
      lse_log2 = RowStats<64>(smem.lse_log2[stage]);
    } else {
      lse_log2.read(smem.lse_log2[stage], 0);  // the others beside the exponentials: kept, they spilled
      reach = backward::reach_of_tile<64>(params.score, params.scale_log2, smem.lse_log2[stage]);
    }
  };
  clear(tdVrdV);
  if (range.begin != range.end) {
    smem.k_pipeline.wait_full({});  // TMA: K has landed
    smem.q_pipeline.wait_full({});  // TMA: Q and lse_log2 have landed
    read_lse(0);
    issue_scores(0);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrS);
  }
  role.for_each_row_tile(range, [&](int m, int i, bool last, int head) __attribute__((always_inline)) {
    PipelineState<2> const state = at_step(i);
    bool masked;
    if constexpr (Traits::kVariant.reads_mask) {
      masked = uniform(smem.visits.at(i).masked) != 0;
      m = smem.visits.at(i).m_block;
    } else {
      masked = range.needs_mask(m);
    }
    if constexpr (kModified) {
      if (reach == backward::Reach::kAny && params.score.softcap_scale != 0.f) cap_scores(tSrS, params.score);
    }
    if (masked) {
      // (keys, rows) -> (key, row)
      auto tScS = rowcol_view(role.mma_scores.get_slice(threadIdx.x % 128).partition_C(cS));
      if constexpr (Traits::kVariant.reads_mask) {
        auto const columns = backward::TileColumns::of_rows<64>(params, tile.columns, tile.second_columns, m);
        apply_columns_transposed(scores, tScS, tScS_0, columns, m * 64);
      } else {
        apply_mask_transposed(scores, tScS, tScS_0, lengths(), m * 64, tile.n_block * 64);
      }
    }
    if constexpr (kModified) {
      // (keys, rows) -> (key, row)
      auto tScS = rowcol_view(role.mma_scores.get_slice(threadIdx.x % 128).partition_C(cS));
      auto const exponentiate_with = [&](auto terms) __attribute__((always_inline)) {
        backward::TileBias bias{};
        if constexpr (backward::has_bias(terms)) {  // other scores do not wait for what it reads
          if (head != slope_head) {
            slope_log2 =
                params.scale_log2 * head_slope(params.score, tile.batch, tile.head_kv * params.heads_per_kv + head);
            slope_head = head;
          }
          bias = {.slope_log2 = slope_log2, .offset = (m - tile.n_block) * 64 + shift()};
        }
        auto const before_four = [&](int four) __attribute__((always_inline)) {
          if (four > 0) lse_log2.read(smem.lse_log2[state.stage], four);
        };
        backward::exponentiate_modified<terms>(scores, tScS, tScS_0, lse_log2, params.score, params.scale_log2, bias,
                                          before_four, rP);
      };
      backward::with_terms(params.score, reach, exponentiate_with);
    } else {
      exponentiate(scores, lse_log2, params.scale_log2);
    }
    __syncwarp();  // all lanes have read the statistics
    smem.q_pipeline.release(state);  // the other release of this stage comes from the dK warpgroup
    if constexpr (!kModified) convert(tSrS, rP);
    auto const rP4 = recast<uint4>(tSrS);  // (MMA / 4, MMA_N, MMA_M): for the dK warpgroup
    static_assert(decltype(size(rP4))::value * 128 == std::extent_v<decltype(smem.p), 1>);
    smem.p_pipeline.wait_empty(state);  // the dK warpgroup's four warps have read P^T of two steps before
    CUTE_UNROLL
    for (int j = 0; j < size(rP4); ++j) smem.p[state.stage][j * 128 + threadIdx.x % 128] = rP4(j);
    smem.p_pipeline.arrive_full(state);

    smem.dout_pipeline.wait_full(state);  // TMA: dO has landed
    issue_gemm<Accumulate::kAdd>(role.mma_sums, tdVrP, operands.at(tdVrdO, smem.dout[state.stage]), tdVrdV);
    if (!last) {
      smem.q_pipeline.wait_full(at_step(i + 1));
      read_lse((i + 1) & 1);
    }
    issue_scores(i + 1);  // after the last tile on stale data: the result is not used
    warpgroup_wait<1>();  // dV
    warpgroup_fence_operand(tdVrdV);
    smem.dout_pipeline.release(state);
    warpgroup_wait<0>();  // S^T
    warpgroup_fence_operand(tSrS);
  });
  store_sums<Traits, Traits::kHeadDimV>(args.dv, smem.k, 0, tdVrdV, 1.f, tile.n_block * 64, tile.head_kv,
                     backward::origin_of_results(params, tile));
}

// dS^T = P^T (V dO^T - delta), dK += dS^T Q.
template <class Traits>
CUTE_DEVICE void dk_consumer(KernelArgs const& args, typename Traits::KeysStorage& smem) {
  using Element = typename Traits::Element;
  BwdParams const& params = args.params;
  TileRange const range = row_range_of(params, smem.tile);
  KeysRole<Traits, Traits::kHeadDimV, Traits::kHeadDim> role{args, smem};
  Operands const operands(smem);
  auto tSrV = role.a_operand(smem.v);               // (MMA, MMA_N, MMA_D)
  auto tSrdO = role.b_operand(smem.dout[0]);        // (MMA, MMA_M, MMA_D)
  auto tdKrQ = role.b_operand_of_sums(smem.q[0]);   // (MMA, MMA_D, MMA_M)
  RowStats<64> delta;                               // of the row tile whose dP^T is in flight
  auto tSrdP = role.scores();                       // (MMA, MMA_N, MMA_M)
  auto dscores = rowcol_view(tSrdP);                // (keys, rows)
  auto tSrP = make_tensor_like(tSrdP);              // (MMA, MMA_N, MMA_M)
  auto rdS = make_tensor_like<Element>(tSrdP);      // (MMA, MMA_N, MMA_M)
  auto tdKrdS = make_tensor(rdS.data(), operand_a_layout_64(rdS.layout()));  // (MMA, MMA_N, MMA_K)
  auto tdKrdK = role.sums();                                                 // (MMA, MMA_N, MMA_D)

  auto issue_dscores = [&](int i) __attribute__((always_inline)) {
    auto tSrV_now = operands.at(tSrV, smem.v);  // (MMA, MMA_N, MMA_D)
    issue_gemm<Accumulate::kOverwrite>(role.mma_scores, tSrV_now, operands.at(tSrdO, smem.dout[i & 1]), tSrdP);
  };
  clear(tdKrdK);
  if (range.begin != range.end) {
    smem.v_pipeline.wait_full({});     // TMA: V has landed
    smem.dout_pipeline.wait_full({});  // TMA: dO and delta have landed
    delta = RowStats<64>(smem.delta[0]);
    issue_dscores(0);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrdP);
  }
  role.for_each_row_tile(range, [&](int /*m*/, int i, bool last, int /*head*/) __attribute__((always_inline)) {
    PipelineState<2> const state = at_step(i);
    auto rP4 = recast<uint4>(tSrP);  // (MMA / 4, MMA_N, MMA_M)
    static_assert(decltype(size(rP4))::value * 128 == std::extent_v<decltype(smem.p), 1>);
    smem.p_pipeline.wait_full(state);  // the dV warpgroup's four warps have stored P^T
    CUTE_UNROLL
    for (int j = 0; j < size(rP4); ++j) rP4(j) = smem.p[state.stage][j * 128 + threadIdx.x % 128];
    subtract(dscores, delta);
    differentiate(tSrP, tSrdP);
    __syncwarp();  // all lanes have read P^T and the statistics
    smem.p_pipeline.release(state);
    smem.dout_pipeline.release(state);
    convert(tSrdP, rdS);

    smem.q_pipeline.wait_full(state);  // TMA: Q has landed
    issue_gemm<Accumulate::kAdd>(role.mma_sums, tdKrdS, operands.at(tdKrQ, smem.q[state.stage]), tdKrdK);
    if (!last) {
      smem.dout_pipeline.wait_full(at_step(i + 1));
      delta = RowStats<64>(smem.delta[(i + 1) & 1]);
    }
    issue_dscores(i + 1);  // after the last tile on stale data: the result is not used
    warpgroup_wait<1>();   // dK
    warpgroup_fence_operand(tdKrdK);
    smem.q_pipeline.release(state);
    warpgroup_wait<0>();  // dP^T
    warpgroup_fence_operand(tSrdP);
  });
  typename Traits::Tile const volatile& tile = smem.tile;
  store_sums<Traits, Traits::kHeadDim>(args.dk, smem.v, 1, tdKrdK, params.scale, tile.n_block * 64, tile.head_kv,
                     backward::origin_of_results(params, tile));
}

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
    smem.tile.begin = 0;
    find_key_tile<Traits>(args, smem.tile);
    smem.tile.keys_phase = 0;
    smem.k_pipeline.init(4);
    smem.v_pipeline.init(4);
    smem.q_pipeline.init(8);
    smem.dout_pipeline.init(8);
    smem.p_pipeline.init(4, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes the barriers visible to TMA
  }
  __syncthreads();  // thread 0 has written the tile and initialised the barriers
  if (Traits::kVariant.reads_sequences && smem.tile.n_block < 0) return;  // there are fewer tiles than CTAs

  if (warpgroup == 0) {
    lower_max_registers<Traits::kProducerRegs>();
    if (threadIdx.x == 0) load_key_tile<Traits>(args, smem, smem.tile);
  } else if (warpgroup == 1) {
    raise_max_registers<Traits::kConsumerRegs>();
    dv_consumer<Traits>(args, smem);
  } else {
    raise_max_registers<Traits::kConsumerRegs>();
    dk_consumer<Traits>(args, smem);
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_registers
