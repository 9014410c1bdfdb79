// The portable backward for head dims above 256: a kernel for dK and dV, whose CTAs own 64 keys, and one for dQ, whose
// CTAs own 64 query rows. Both compute at most 512 columns of a gradient per CTA, with all sums in registers: they are
// deterministic, and dK and dV of the query heads that share a KV head are summed there too.
//
// As in the forward (see ../fwd_large/kernel.cuh), scores are summed over chunks of 64 columns of the head dim, which
// pass through a ring of stages, W = P or dS goes through shared memory, and each warp computes an eighth of the
// columns. dK needs W = dS^T, dQ W = dS: S and dP; dV needs W = P^T: S alone.
#pragma once

#include "../../plan.h"
#include "epilogue.cuh"
#include "mainloop.cuh"

namespace flash_cute::sm80::bwd_large {

template <class Traits, Side kSide>
CUTE_DEVICE void compute(BwdParams const& params, typename Traits::Storage& smem, Ring const& ring) {
  using Element = typename Traits::Element;
  Task<Element> const& task = smem.task;
  uint32_t const buffers = cast_smem_ptr_to_uint(&smem) + kFixedBytes;
  typename Traits::OutMma out_mma;
  auto out = partition_fragment_C(out_mma, Shape<Int<kTileRows>, Int<large::kColumns>>{});  // (4, 4, kOutBlocks)
  clear(out);
  if (task.others.begin < task.others.end) {
    int const resident_chunks = ring.left_resident ? task.score_steps : 0;
    large::Pipeline pipeline(buffers + resident_chunks * large::kLeftBytes, ring);
    Loader<Element, kSide> load(task, ring.left_resident);
    if (ring.left_resident) load.load_left(buffers);
    pipeline.start(load);
    mainloop<Traits, kSide>(params, smem, pipeline, load, {buffers, ring.left_resident}, out);
  }
  epilogue<Traits>(params, smem, buffers, out, threadIdx.x);
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
  if (blockIdx.y < large::column_parts(params.head_dim)) {
    compute<Traits, Side::kKeys>(params, smem, rings.gradients);
  } else {
    compute<Traits, Side::kKeys>(params, smem, rings.weights);
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
  compute<Traits, Side::kQueries>(params, smem, rings.gradients);
}

}  // namespace flash_cute::sm80::bwd_large
