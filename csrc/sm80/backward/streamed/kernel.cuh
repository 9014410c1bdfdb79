// The portable backward for head dims above 256: a kernel for dK and dV, whose CTAs own 64 keys, and one for dQ, whose
// CTAs own 64 query rows. Both compute at most 512 columns of a gradient per CTA, with all sums in registers: they are
// deterministic, and dK and dV of the query heads that share a KV head are summed there too.
//
// As in the forward (see forward/streamed/kernel.cuh), scores are summed over chunks of 64 columns of the head dim,
// which pass through a ring of stages, W = P or dS goes through shared memory, and each warp computes an eighth of the
// columns. dK needs W = dS^T, dQ W = dS: S and dP; dV needs W = P^T: S alone.
//
// Above 512 columns two CTAs share a tile of a gradient: half of the columns each, and half of W, see pair.cuh.
#pragma once

#include "contract/plan.h"
#include "epilogue.cuh"
#include "mainloop.cuh"
#include "pair_mainloop.cuh"

namespace flash_cute::sm80::backward::streamed {

// The task in smem.task.
template <class Traits, Side kSide>
CUTE_DEVICE void compute(BwdParams const& params, typename Traits::Storage& smem, Ring const& ring,
                         typename Traits::Partner const& partner) {
  auto const& task = smem.task;
  uint32_t const buffers = cast_smem_ptr_to_uint(&smem) + kFixedBytes;
  typename Traits::OutMma out_mma;
  auto out = partition_fragment_C(out_mma, Shape<Int<kTileRows>, Int<streaming::kColumns>>{});  // (4, 4, kOutBlocks)
  clear(out);
  if (task.others.begin < task.others.end) {
    int const resident_chunks = ring.left_resident ? task.score_steps : 0;
    streaming::Pipeline pipeline(buffers + resident_chunks * streaming::kLeftBytes, ring);
    Loader<Traits, kSide> load(smem, ring.left_resident);
    if (ring.left_resident) load.load_left(buffers);
    pipeline.start(load);
    mainloop<Traits, kSide>(params, smem, pipeline, load, {buffers, ring.left_resident}, partner, out);
  }
  epilogue<Traits>(params, smem, buffers, out, partner.thread());
}

// Grid: (key tiles of all KV heads, parts of dK's columns and then of dV's).
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_keys_kernel(__grid_constant__ BwdParams const params, __grid_constant__ Rings const rings) {
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::Storage*>(smem_raw);
  if (threadIdx.x == 0) find_keys_task(params, blockIdx.x, blockIdx.y, smem.task);
  __syncthreads();  // the task is there
  if (smem.task.tile < 0) return;
  // Two loops, so that the ring's sizes need no registers.
  if (blockIdx.y < streaming::column_parts(params.head_dim)) {
    compute<Traits, Side::kKeys>(params, smem, rings.gradients, Alone{});
  } else {
    compute<Traits, Side::kKeys>(params, smem, rings.weights, Alone{});
  }
}

// Grid: (row tiles of all query heads, parts of dQ's columns).
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_queries_kernel(__grid_constant__ BwdParams const params, __grid_constant__ Rings const rings) {
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::Storage*>(smem_raw);
  if (threadIdx.x == 0) find_queries_task(params, blockIdx.x, blockIdx.y, smem.task);
  __syncthreads();  // the task is there
  if (smem.task.tile < 0) return;
  compute<Traits, Side::kQueries>(params, smem, rings.gradients, Alone{});
}

// Shared memory by one address that the compiler keeps. It had a copy of the address for each use in the loop over
// tasks, in all uniform registers, so that values of the main loop spilled.
template <class Storage>
CUTE_DEVICE Storage& opaque_shared(char* smem) {
  return *static_cast<Storage*>(__cvta_shared_to_generic(opaque(static_cast<int>(cast_smem_ptr_to_uint(smem)))));
}

template <class Storage>
CUTE_DEVICE void begin_pair(PairMemory const& memory, Storage& smem) {
  if (threadIdx.x == 0) smem.pair = {.ticket = atomicAdd(memory.tickets, 1)};
}

// Of dK or of dV.
template <class Element>
CUTE_DEVICE Found find_keys_task_of_unit(BwdParams const& params, bool is_dv, int unit, int part, Task<Element>& task) {
  int const parts = streaming::column_parts(is_dv ? params.head_dim_v : params.head_dim);
  int const first_part = is_dv ? streaming::column_parts(params.head_dim) : 0;
  if (unit >= units(params.tiles.totals[1] * params.heads_kv, parts)) return Found::kNothing;
  bool const shared = parts == 2;
  find_keys_task(params, shared ? unit : 2 * unit + part, first_part + (shared ? part : 0), task);
  return shared ? Found::kSharedTile : Found::kOwnTile;
}

// dK and then dV by pairs, where one of them or both have two parts: grid 2 * pairs. Of a gradient with one part each
// CTA of a pair has a tile of its own.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_keys_pair_kernel(__grid_constant__ BwdParams const params, __grid_constant__ Rings const rings,
                         __grid_constant__ PairMemory const memory) {
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = opaque_shared<typename Traits::Storage>(smem_raw);
  begin_pair(memory, smem);
  auto const take = [&](bool is_dv) {
    return take_unit(memory, memory.units + is_dv, smem, [&](int unit, int part) {
      return find_keys_task_of_unit(params, is_dv, unit, part, smem.task);
    });
  };
  while (take(/*is_dv=*/false)) {
    if (smem.task.tile >= 0) compute<Traits, Side::kKeys>(params, smem, rings.gradients, Exchange(memory, smem.pair));
  }
  while (take(/*is_dv=*/true)) {
    if (smem.task.tile >= 0) compute<Traits, Side::kKeys>(params, smem, rings.weights, Exchange(memory, smem.pair));
  }
}

template <class Element>
CUTE_DEVICE Found find_queries_task_of_unit(BwdParams const& params, int unit, int part, Task<Element>& task) {
  int const tiles = params.tiles.totals[0];
  if (unit >= tiles * params.heads_q) return Found::kNothing;
  int const head = unit / tiles, from_last = unit - head * tiles;
  find_queries_task(params, head * params.m_blocks + params.m_blocks - tiles + from_last, part, task);
  return Found::kSharedTile;
}

// dQ by pairs: grid 2 * pairs.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_queries_pair_kernel(__grid_constant__ BwdParams const params, __grid_constant__ Rings const rings,
                            __grid_constant__ PairMemory const memory) {
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = opaque_shared<typename Traits::Storage>(smem_raw);
  begin_pair(memory, smem);
  auto const find_task = [&](int unit, int part) {
    return find_queries_task_of_unit(params, unit, part, smem.task);
  };
  while (take_unit(memory, memory.units, smem, find_task)) {
    if (smem.task.tile < 0) continue;
    compute<Traits, Side::kQueries>(params, smem, rings.gradients, Exchange(memory, smem.pair));
  }
}

}  // namespace flash_cute::sm80::backward::streamed
