// The work of a CTA of the portable backward: a key tile, and the row tiles that it visits.
#pragma once

#include <cute/config.hpp>

#include "core/mask.cuh"
#include "core/registers.cuh"
#include "contract/params.h"

namespace flash_cute::sm80::backward::dq_in_memory {

// The index of a CTA's key tile in launch order. In the deterministic mode CTAs wait for those of lower index, so each
// draws its index as a ticket when it begins to run: CUDA does not promise the order in which it starts CTAs.
template <bool kDeterministic>
CUTE_DEVICE int draw_index(BwdParams const& params, int* smem) {
  if constexpr (!kDeterministic) {
    return blockIdx.x;
  } else {
    if (threadIdx.x == 0) {
      int const ticket = atomicAdd(params.counters, 1);
      params.drawn[blockIdx.x] = ticket;
      *smem = ticket;
    }
    __syncthreads();  // thread 0 has stored the ticket
    int const ticket = *smem;
    __syncthreads();  // all threads have read it: the shared memory may be reused
    return ticket;
  }
}

// Reads the index again, for the epilogue: cheaper than a register kept across the main loop.
template <bool kDeterministic>
CUTE_DEVICE int reread_index(BwdParams const& params) {
  int const block = fresh_block_index();
  return kDeterministic ? *const_cast<int volatile const*>(params.drawn + block) : block;
}

// The key tile of an index in launch order: tile 0 of every KV head of a group, then their tile 1, ..., so that CTAs
// that read the same Q and dO run at about the same time. It begins with tile 0, the longest with a causal mask, or
// with the last tile, see LaunchOrder::last_first.
struct KeyTile {
  int n_block;
  int head_kv;
  int batch;

  CUTE_DEVICE KeyTile(BwdParams const& params, int index) {
    LaunchOrder const& order = params.launch_order;
    int const group = min(index / (params.n_blocks * order.interleaved_heads), order.last_group);
    int const first_head = group * order.interleaved_heads;
    int const rank = index - first_head * params.n_blocks;  // in the group
    int const heads = group < order.last_group ? order.interleaved_heads : params.batch * params.heads_kv - first_head;
    n_block = order.last_first ? params.n_blocks - 1 - rank / heads : rank / heads;
    int const head = first_head + rank % heads;  // over all batches
    head_kv = head % params.heads_kv;
    batch = head / params.heads_kv;
  }
};

// A row tile of a query head.
struct RowTile {
  int head;  // query head
  int m_block;

  // Its index among all row tiles, which locates its sums and statistics in the workspace.
  CUTE_DEVICE int64_t index(BwdParams const& params, int batch) const {
    return (int64_t{batch} * params.heads_q + head) * params.m_blocks + m_block;
  }
};

// The work of a CTA: a key tile, and the order in which it visits row tiles. All row tiles of a query head that see the
// key tile come before those of the next head.
template <class Schedule>
struct Task {
  static constexpr int kBlockM = Schedule::Traits::kBlockM, kBlockN = Schedule::Traits::kBlockN;

  BwdParams const& params;
  bool const ascends;     // from the first row tile of a head to the last, else from the last to the first
  KeyTile const tile;
  TileRange const range;  // of row tiles; what does not fit in registers is recomputed from the band at each use

  CUTE_DEVICE Task(BwdParams const& params_, int index)
      : params(params_),
        ascends(Schedule::kMayAscend && params_.launch_order.last_first),
        tile(params_, index),
        range(row_range<kBlockM, kBlockN>(params_, tile.n_block)) {}

  CUTE_DEVICE bool empty() const { return range.begin == range.end; }
  __device__ inline int lowest() const {
    if constexpr (Schedule::kFirstTileInRegs) {
      return range.begin;
    } else {
      return row_range<kBlockM, kBlockN>(params, opaque(tile.n_block)).begin;
    }
  }
  __device__ inline int highest() const { return row_range<kBlockM, kBlockN>(params, opaque(tile.n_block)).end - 1; }
  __device__ inline int first() const { return ascends ? lowest() : highest(); }
  __device__ inline int last() const { return ascends ? highest() : lowest(); }

  __device__ inline RowTile next(RowTile row_tile) const {
    if (row_tile.m_block == last()) {
      row_tile.m_block = first();
      row_tile.head += 1;
    } else {
      row_tile.m_block += ascends ? 1 : -1;
    }
    return row_tile;
  }
  __device__ inline RowTile previous(RowTile row_tile) const {
    if (row_tile.m_block == first()) {
      row_tile.m_block = last();
      row_tile.head -= 1;
    } else {
      row_tile.m_block += !ascends ? 1 : -1;
    }
    return row_tile;
  }
};

}  // namespace flash_cute::sm80::backward::dq_in_memory
