// What a CTA of the portable backward works on: a key tile, and the row tiles that it visits.
#pragma once

#include <cute/config.hpp>

#include "../../core/registers.cuh"
#include "../../params.h"

namespace flash_cute::sm80::bwd {

// The number of a CTA's key tile in launch order. In the deterministic mode CTAs wait for those of lower numbers, so that
// they draw their numbers when they begin to run: CUDA does not promise the order in which it starts them.
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
    __syncthreads();
    int const task = *smem;
    __syncthreads();  // the place in shared memory is free again
    return task;
  }
}

// The same once more: a read is cheaper than a register kept through the main loop.
template <bool kDeterministic>
CUTE_DEVICE int reread_task(BwdParams const& params) {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return kDeterministic ? *const_cast<int volatile const*>(params.drawn + block) : block;
}

// The key tile of a number. First come the first tiles of a group of KV heads, then their second ones, ...: CTAs that read
// the same Q and dO run at about the same time. From tile 0 on, which with a causal mask is the longest; or from the last
// one, see LaunchOrder::last_first.
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

// A row tile among those that a key tile visits, head after head.
struct RowTile {
  int head;  // of q
  int m_block;

  // To the next one from first to last, up or down; after the last one to the first one of another head.
  template <class First, class Last>
  CUTE_DEVICE void step(bool up, First first, Last last, int heads) {
    if (m_block == last()) {
      m_block = first();
      head += heads;
    } else {
      m_block += up ? 1 : -1;
    }
  }

  // Its number among all row tiles: that of its sums and statistics in the workspace.
  CUTE_DEVICE int64_t index(BwdParams const& params, int batch) const {
    return (int64_t{batch} * params.heads_q + head) * params.m_blocks + m_block;
  }
};

}  // namespace flash_cute::sm80::bwd
