// The loop over key tiles: S = Q K^T, mask, online softmax, O += P V, from the last tile to the first.
//
// All warps load (cp.async) and all compute. A warp owns whole rows of Q, S, P and O, so that a step needs barriers
// only where a K or V buffer is refilled:
//   two stages: K and V of tile n-1 are in flight during the whole step of tile n; one barrier per step.
//   one stage:  V(n) is in flight during S = Q K(n), K(n-1) during softmax and O += P V(n); two barriers per step.
#pragma once

#include <cute/tensor.hpp>

#include "../../core/convert.cuh"
#include "../../core/layout.cuh"
#include "../../core/mask.cuh"
#include "../../core/tile_order.h"
#include "../../core/softmax.cuh"
#include "traits.cuh"
#include "../gemm.cuh"
#include "../load_cp_async.cuh"

namespace flash_cute::sm80::fwd {

// The three kinds of key tiles that a row tile visits, from the last tile to the first. Only the last tile may reach
// past the end of the keys.
struct UpperEdge {  // at the band's upper edge, or at the end of the keys
  static constexpr bool kMasked = true;
  static constexpr RowCheck kRowCheck = RowCheck::kEach;
};
struct Whole {  // every row sees every key
  static constexpr bool kMasked = false;
  static constexpr RowCheck kRowCheck = RowCheck::kNone;
};
struct LowerEdge {  // at the band's lower edge
  static constexpr bool kMasked = true;
  static constexpr RowCheck kRowCheck = RowCheck::kNone;
};

// Starts the load of a tile of K or V, and moves gX on to the next tile to load, the one before it in memory.
template <RowCheck kRowCheck, class Traits, class Smem>
__device__ inline void load_next(typename Traits::Element const*& gX, int64_t row_stride,
                                 Smem&& sX,  // (BLK_N, D)
                                 int keys, int head_dim) {
  load_tile<kRowCheck>(typename Traits::GmemLoad{}, gX, row_stride, sX, keys, head_dim);
  gX -= Traits::kBlockN * row_stride;
}

// Leaves the unnormalized O in tOrO and the row statistics in softmax.
template <class Traits, class Softmax, class Accumulator>
CUTE_DEVICE void mainloop(FwdParams const& params, RowTileCoord const tile, typename Traits::SharedStorage& smem,
                          Softmax& softmax,
                          Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr bool kTwoStages = Traits::kStages == 2, kQInRegs = Traits::kTile.q_in_regs;
  int const thread = threadIdx.x;
  int const head_kv = tile.head / (params.heads_q / params.heads_kv);

  TileRange const range = key_range<kBlockM, kBlockN>(params, tile.m_block);
  if (range.begin == range.end) return;

  // Shared memory.
  auto sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutQ{});    // (BLK_M, D)
  auto sK = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemLayoutKV{});   // (BLK_N, D, stage)
  auto sV = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemLayoutKV{});   // (BLK_N, D, stage)
  auto sVt = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemLayoutVt{});  // (D, BLK_N, stage)

  // Global memory: pointers to the tile of Q, and to the next tiles of K and V to load.
  auto tile_begin = [&](void const* base, Strides const& strides, int head, int row) {
    return static_cast<Element const*>(base) + tile.batch * strides.batch + head * strides.head + row * strides.row;
  };
  Element const* gQ = tile_begin(params.q, params.q_strides, tile.head, tile.m_block * kBlockM);
  Element const* gK = tile_begin(params.k, params.k_strides, head_kv, (range.end - 1) * kBlockN);
  Element const* gV = tile_begin(params.v, params.v_strides, head_kv, (range.end - 1) * kBlockN);

  // The MMAs, and the copies from shared memory to registers.
  typename Traits::Mma mma;
  auto tSrQ = fragment_a<Element>(mma, Shape<Int<kBlockM>, Int<kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
  auto tSrK = fragment_b<Element>(mma, Shape<Int<kBlockN>, Int<kHeadDim>>{});  // (MMA, MMA_N, MMA_D)
  auto tOrV = fragment_b<Element>(mma, Shape<Int<kHeadDim>, Int<kBlockN>>{});  // (MMA, MMA_D, MMA_N)
  auto const copy_q = make_tiled_copy_A(typename Traits::SmemCopyAtom{}, mma);
  auto const copy_k = make_tiled_copy_B(typename Traits::SmemCopyAtom{}, mma);
  auto const copy_v = make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, mma);
  auto tSsQ = copy_q.get_slice(thread).partition_S(sQ);      // (CPY, CPY_M, CPY_D)
  auto tSrQ_copy = copy_q.get_slice(thread).retile_D(tSrQ);  // (CPY, CPY_M, CPY_D)
  auto tSrK_copy = copy_k.get_slice(_0{}).retile_D(tSrK);    // (CPY, CPY_N, CPY_D)
  auto tOsV = copy_v.get_slice(thread).partition_S(sVt);     // (CPY, CPY_D, CPY_N, stage)
  auto tOrV_copy = copy_v.get_slice(_0{}).retile_D(tOrV);    // (CPY, CPY_D, CPY_N)
  CUTE_STATIC_ASSERT_V(size<1>(tSsQ) == size<1>(tSrQ_copy) && size<2>(tSsQ) == size<2>(tSrQ_copy));
  CUTE_STATIC_ASSERT_V(size<1>(tOsV) == size<1>(tOrV_copy) && size<2>(tOsV) == size<2>(tOrV_copy));

  // The tiles at the band's lower edge, recomputed at each use: kept in registers, they spilled.
  // With eight warps the recomputation spilled too: they branch, which costs 1 %.
  constexpr bool kBranches = Traits::kWarps == 8;
  auto begin = [&] {
    if (kBranches && !params.band.has_lower()) return 0;
    return first_column(params, opaque(tile.m_block) * kBlockM) / kBlockN;
  };
  auto whole_begin = [&] {
    if (kBranches && !params.band.has_lower()) return 0;
    return ceil_div(first_column(params, opaque(tile.m_block) * kBlockM + (kBlockM - 1)), kBlockN);
  };
  auto step = [&](int n, int stage, auto kind) __attribute__((always_inline)) {
    using Kind = decltype(kind);
    cp_async_wait<0>();  // this thread's copies of K(n), and with two stages of V(n), have landed
    __syncthreads();     // those of all threads have; and all have finished reading tile n+1: its buffers are free
    if constexpr (kTwoStages) {
      if (n > begin()) {
        load_next<RowCheck::kNone, Traits>(gK, params.k_strides.row, sK(_, _, stage ^ 1), kBlockN, params.head_dim);
        load_next<RowCheck::kNone, Traits>(gV, params.v_strides.row, sV(_, _, stage ^ 1), kBlockN, params.head_dim);
      }
    } else {
      int const keys = params.len_k - n * kBlockN;
      load_next<Kind::kRowCheck, Traits>(gV, params.v_strides.row, sV(_, _, _0{}), keys, params.head_dim);
    }
    cp_async_fence();

    auto tSrS = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
    clear(tSrS);
    auto tSsK = copy_k.get_slice(fresh_thread_index()).partition_S(sK(_, _, stage));  // (CPY, CPY_N, CPY_D)
    CUTE_STATIC_ASSERT_V(size<1>(tSsK) == size<1>(tSrK_copy) && size<2>(tSsK) == size<2>(tSrK_copy));
    pipelined_gemm(mma, tSrS, tSrQ, tSrK, [&](int k) {
      copy(copy_k, tSsK(_, _, k), tSrK_copy(_, _, k));
      if constexpr (!kQInRegs) copy(copy_q, tSsQ(_, _, k), tSrQ_copy(_, _, k));
    });

    if constexpr (!kTwoStages) {
      cp_async_wait<0>();  // this thread's copies of V(n) have landed
      __syncthreads();     // those of all threads have; and all have finished reading K(n): its buffer is free
      if (n > begin()) {
        load_next<RowCheck::kNone, Traits>(gK, params.k_strides.row, sK(_, _, _0{}), kBlockN, params.head_dim);
      }
      cp_async_fence();
    }

    auto scores = rowcol_view(tSrS);  // (rows, columns)
    if constexpr (Kind::kMasked) {
      auto cS = make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{});
      auto tScS = rowcol_view(mma.get_slice(fresh_thread_index()).partition_C(cS));  // (rows, columns) -> (row, column)
      auto tScS_0 = rowcol_view(mma.get_slice(_0{}).partition_C(cS));                // the same for thread 0
      apply_mask(scores, tScS, tScS_0, params, tile.m_block * kBlockM - n * kBlockN, params.len_k - n * kBlockN);
    }
    auto acc = rowcol_view(tOrO);  // (rows, head dim)
    softmax.update_max(scores, acc);
    softmax.numerators(scores);

    auto rP = make_tensor_like<Element>(tSrS);  // (MMA, MMA_M, MMA_N)
    convert(tSrS, rP);
    auto tOrP = make_tensor(rP.data(), operand_a_layout(rP.layout()));  // (MMA, MMA_M, MMA_K)
    pipelined_gemm(mma, tOrO, tOrP, tOrV, [&](int k) { copy(copy_v, tOsV(_, _, k, stage), tOrV_copy(_, _, k)); });
  };

  load_tile<RowCheck::kEach>(typename Traits::GmemLoad{}, gQ, params.q_strides.row, sQ,
                             params.len_q - tile.m_block * kBlockM, params.head_dim);
  cp_async_fence();
  int const last_keys = params.len_k - (range.end - 1) * kBlockN;
  load_next<RowCheck::kEach, Traits>(gK, params.k_strides.row, sK(_, _, _0{}), last_keys, params.head_dim);
  if constexpr (kTwoStages) {
    load_next<RowCheck::kEach, Traits>(gV, params.v_strides.row, sV(_, _, _0{}), last_keys, params.head_dim);
  }
  cp_async_fence();
  if constexpr (kQInRegs) {
    cp_async_wait<1>();  // this thread's copies of Q have landed; those of K may still be in flight
    __syncthreads();     // those of all threads have
    copy(copy_q, tSsQ, tSrQ_copy);
  }

  // The tiles at the band's upper edge, the whole ones, and those at its lower edge. A mask in the loop of the whole
  // ones, even behind a branch, costs 10 to 20 %.
  int n = range.end - 1, stage = 0;
  for (; n >= range.whole_end; --n, stage ^= int(kTwoStages)) step(n, stage, UpperEdge{});
  for (; n >= whole_begin(); --n, stage ^= int(kTwoStages)) step(n, stage, Whole{});
  for (; n >= begin(); --n, stage ^= int(kTwoStages)) step(n, stage, LowerEdge{});
  softmax.template finish<Element>();
}

}  // namespace flash_cute::sm80::fwd
