// The work of a CTA of the portable backward: a key tile, and the row tiles that it visits.
#pragma once

#include <cute/config.hpp>

#include "../../core/registers.cuh"
#include "../../params.h"

namespace flash_cute::sm80::bwd {

// The index of a CTA's key tile in launch order. In the deterministic mode CTAs wait for those of lower index, so each
// draws its index as a ticket when it begins to run: CUDA does not promise the order in which it starts CTAs.
template <bool kDeterministic>
CUTE_DEVICE int draw_task(BwdParams const& params, int* smem) {
  if constexpr (!kDeterministic) {
    return blockIdx.x;
  } else {
    if (threadIdx.x == 0) {
      int const task = atomicAdd(params.counters, 1);
      params.drawn[blockIdx.x] = task;
      *smem = task;
    }
    __syncthreads();  // thread 0 has stored the ticket
    int const task = *smem;
    __syncthreads();  // all threads have read it: the shared memory may be reused
    return task;
  }
}

// Reads the index again, for the epilogue: cheaper than a register kept across the main loop.
template <bool kDeterministic>
CUTE_DEVICE int reread_task(BwdParams const& params) {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return kDeterministic ? *const_cast<int volatile const*>(params.drawn + block) : block;
}

// The key tile of an index in launch order: tile 0 of every KV head of a group, then their tile 1, ..., so that CTAs
// that read the same Q and dO run at about the same time. It begins with tile 0, the longest with a causal mask, or
// with the last tile, see LaunchOrder::last_first.
struct KeyTile {
  int n_block;
  int head_kv;
  int batch;

  CUTE_DEVICE KeyTile(BwdParams const& params, int task) {
    LaunchOrder const& order = params.launch_order;
    int const number = min(task / (params.n_blocks * order.interleaved_heads), order.last_group);
    int const first = number * order.interleaved_heads;
    int const rank = task - first * params.n_blocks;
    int const heads = number < order.last_group ? order.interleaved_heads : params.batch * params.heads_kv - first;
    n_block = order.last_first ? params.n_blocks - 1 - rank / heads : rank / heads;
    int const head = first + rank % heads;
    head_kv = head % params.heads_kv;
    batch = head / params.heads_kv;
  }
};

// A row tile among those that a key tile visits; all row tiles of a query head come before those of the next.
struct RowTile {
  int head;  // query head
  int m_block;

  // Moves one tile up or down, from first() to last(); after last() to first() of the head `heads` further.
  template <class First, class Last>
  CUTE_DEVICE void step(bool up, First first, Last last, int heads) {
    if (m_block == last()) {
      m_block = first();
      head += heads;
    } else {
      m_block += up ? 1 : -1;
    }
  }

  // Its index among all row tiles, which locates its sums and statistics in the workspace.
  CUTE_DEVICE int64_t index(BwdParams const& params, int batch) const {
    return (int64_t{batch} * params.heads_q + head) * params.m_blocks + m_block;
  }
};

}  // namespace flash_cute::sm80::bwd
