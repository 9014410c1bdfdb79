// The loads of the kernel that reads sequences at run time. Rows and keys that a sequence does not use are filled with
// zeros: what is there may be the next sequence's, or NaN.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/tensor.hpp>

#include "load.cuh"
#include "sequence_traits.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

// Starts the copy of the task's keys of K or V.
template <class Schedule, class Smem>
__device__ inline void load_keys(BwdParams const& params, typename Schedule::Traits::Task const& task,
                                 void const* base, Strides const& strides,
                                 Smem&& sX) {  // (BLK_N, D)
  using Traits = typename Schedule::Traits;
  int const first_key = task.n_block * Traits::kBlockN;
  auto const* gX = static_cast<typename Traits::Element const*>(base) +
                   sequence_offset(params, strides, task.index, task.sequence.first_key, task.head_kv) +
                   first_key * strides.row;
  load_tile<RowCheck::kEach>(typename Traits::GmemLoad{}, gX, strides.row, sX, task.sequence.len_k - first_key,
                             params.head_dim);
}

// Starts the copy of a row tile of Q or dO.
template <class Traits, class Smem>
CUTE_DEVICE void load_rows(BwdParams const& params, typename Traits::Task const& task, RowTile const& row_tile,
                           void const* row_0, Strides const& strides,
                           Smem&& sX) {  // (BLK_M / parts, D, part)
  CUTE_STATIC_ASSERT_V(size<2>(sX) == Int<Traits::kParts>{});
  int const first_row = row_tile.m_block * Traits::kBlockM;
  auto const* gX = static_cast<typename Traits::Element const*>(row_0) + row_tile.head * strides.head +
                   first_row * strides.row;
  CUTE_UNROLL
  for (int part = 0; part < Traits::kParts; ++part) {
    int const row = part * Traits::kScoreRows;
    load_tile<RowCheck::kEach>(typename Traits::GmemLoad{}, gX + row * strides.row, strides.row, sX(_, _, part),
                               task.sequence.len_q - first_row - row, params.head_dim);
  }
}

template <class Schedule>
__device__ inline void load_q(BwdParams const& params, RowTile const& row_tile,
                              typename Schedule::Traits::SharedStorage& smem, int stage) {
  using Traits = typename Schedule::Traits;
  auto sX = local_tile(smem.sQ(), StageShape<Traits>{}, make_coord(_0{}, _0{}, stage));  // (BLK_M / parts, D, part)
  load_rows<Traits>(params, smem.task, row_tile, smem.task.q, params.q_strides, sX);
}

template <class Schedule>
__device__ inline void load_dout(BwdParams const& params, RowTile const& row_tile,
                                 typename Schedule::Traits::SharedStorage& smem, int stage) {
  using Traits = typename Schedule::Traits;
  auto sX = local_tile(smem.sdO(), StageShape<Traits>{}, make_coord(_0{}, _0{}, stage));  // (BLK_M / parts, D, part)
  load_rows<Traits>(params, smem.task, row_tile, smem.task.dout, params.dout_strides, sX);
}

// Starts the copy of the row statistics, lse_log2 and delta.
template <class Schedule>
__device__ inline void load_stats(BwdParams const& params, RowTile const& row_tile,
                                  typename Schedule::Traits::SharedStorage& smem) {
  constexpr int kBlockM = Schedule::Traits::kBlockM;
  int const row = 4 * fresh_thread_index();  // no check of len_q: the workspace is padded to whole row tiles
  if (row >= kBlockM) return;
  int64_t const index = smem.task.number(params, row_tile) * kBlockM + row;
  using Copy = SM80_CP_ASYNC_CACHEALWAYS<uint128_t>;
  Copy::copy(*reinterpret_cast<uint128_t const*>(params.lse_log2 + index),
             *reinterpret_cast<uint128_t*>(smem.lse_log2[0] + row));
  Copy::copy(*reinterpret_cast<uint128_t const*>(params.delta + index),
             *reinterpret_cast<uint128_t*>(smem.delta[0] + row));
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
