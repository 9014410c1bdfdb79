// The loads of the backward's mainloop: the key tile of K and V, and row tiles of Q and dO with their row statistics
// (LSE and delta).
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/tensor.hpp>

#include "schedule.cuh"
#include "task.cuh"
#include "traits.cuh"
#include "sm80/common/load_cp_async.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

// Starts the copy of a key tile of K or V.
template <class Schedule, class Smem>
__device__ inline void load_key_tile(BwdParams const& params, KeyTile const& tile, void const* base,
                                     Strides const& strides,
                                     Smem&& sX) {  // (BLK_N, D)
  using Traits = typename Schedule::Traits;
  using Element = typename Traits::Element;
  load_tile<RowCheck::kEach>(typename Traits::GmemLoad{},
                             static_cast<Element const*>(base) + tile.batch * strides.batch +
                                 tile.head_kv * strides.head + tile.n_block * Traits::kBlockN * strides.row,
                             strides.row, sX, params.len_k - tile.n_block * Traits::kBlockN, params.head_dim);
}

// Starts the copy of a row tile of Q or dO, and of one statistic of its rows.
template <class Traits, class Smem>
CUTE_DEVICE void load_row_tile(BwdParams const& params, int batch, RowTile const& row_tile, void const* base,
                               Strides const& strides,
                               Smem&& sX,           // (BLK_M / parts, D, part)
                               float const* stats,  // (row tiles, BLK_M)
                               float* smem_stats) {
  using Element = typename Traits::Element;
  CUTE_STATIC_ASSERT_V(size<2>(sX) == Int<Traits::kParts>{});
  int const first_row = row_tile.m_block * Traits::kBlockM;
  auto const* gX = static_cast<Element const*>(base) + batch * strides.batch + row_tile.head * strides.head +
                   first_row * strides.row;
  CUTE_UNROLL
  for (int part = 0; part < Traits::kParts; ++part) {
    int const row = part * Traits::kScoreRows;
    load_tile<RowCheck::kEach>(typename Traits::GmemLoad{}, gX + row * strides.row, strides.row, sX(_, _, part),
                               params.len_q - first_row - row, params.head_dim);
  }
  int const row = 4 * fresh_thread_index();  // no check of len_q: the workspace is padded to whole row tiles
  if (row < Traits::kBlockM) {
    SM80_CP_ASYNC_CACHEALWAYS<uint128_t>::copy(
        *reinterpret_cast<uint128_t const*>(stats + row_tile.index(params, batch) * Traits::kBlockM + row),
        *reinterpret_cast<uint128_t*>(smem_stats + row));
  }
}

template <class Traits>
using StageShape = Shape<Int<Traits::kScoreRows>, Int<Traits::kHeadDim>, Int<Traits::kParts>>;

// Q and lse_log2.
template <class Schedule>
__device__ inline void load_q(BwdParams const& params, int batch, RowTile const& row_tile,
                              typename Schedule::Traits::SharedStorage& smem, int stage) {
  using Traits = typename Schedule::Traits;
  auto sX = local_tile(smem.sQ(), StageShape<Traits>{}, make_coord(_0{}, _0{}, stage));  // (BLK_M / parts, D, part)
  load_row_tile<Traits>(params, batch, row_tile, params.q, params.q_strides, sX, params.lse_log2, smem.lse_log2[stage]);
}

// dO and delta.
template <class Schedule>
__device__ inline void load_dout(BwdParams const& params, int batch, RowTile const& row_tile,
                                 typename Schedule::Traits::SharedStorage& smem, int stage) {
  using Traits = typename Schedule::Traits;
  auto sX = local_tile(smem.sdO(), StageShape<Traits>{}, make_coord(_0{}, _0{}, stage));  // (BLK_M / parts, D, part)
  load_row_tile<Traits>(params, batch, row_tile, params.dout, params.dout_strides, sX, params.delta, smem.delta[stage]);
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
