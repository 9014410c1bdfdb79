// The portable backward of packed batches and of modified scores (softcap, ALiBi). A CTA owns a key tile of a sequence,
// as in kernel.cuh. There are as many CTAs as there can be key tiles; those left over end at once.
//
// Why the files sequence_* stand beside the dense kernel's: that one has its task in registers. Here a task would
// spill, so that each use reads it from shared memory, which then has room for one buffer of row statistics instead of
// two. So loads and steps come in another order. Products, P and dS of a step, and the store of the results are shared.
#pragma once

#include "contract/plan.h"
#include "epilogue.cuh"
#include "sequence_mainloop.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.ctas_per_sm)
    bwd_sequences_kernel(__grid_constant__ BwdParams const params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_raw);
  SequenceTask const& task = smem.task;
  find_task<Traits>(params, smem.task);
  if (task.n_block < 0) return;

  typename Traits::MmaKeys mma;
  using Tile = Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>;
  auto tdKrdK = partition_fragment_C(mma, Tile{});  // (MMA, MMA_N, MMA_D)
  auto tdVrdV = partition_fragment_C(mma, Tile{});  // (MMA, MMA_N, MMA_D)
  clear(tdKrdK);
  clear(tdVrdV);
  if (task.range.begin < task.range.end) sequence_mainloop<Traits>(params, smem, tdKrdK, tdVrdV);

  int const first_key = task.n_block * Traits::kBlockN;
  clear_rows<decltype(mma), Traits::kBlockN>(tdKrdK, task.sequence.len_k - first_key);
  clear_rows<decltype(mma), Traits::kBlockN>(tdVrdV, task.sequence.len_k - first_key);
  auto const results = [&](void* base, Strides const& strides) {
    auto* const head = static_cast<typename Traits::Element*>(base) +
                       sequence_offset(params, strides, task.index, task.sequence.first_key, task.head_kv);
    return make_tensor(make_gmem_ptr(head), make_shape(task.keys, params.head_dim), make_stride(strides.row, _1{}));
  };
  store_results<Traits>(params, smem, results, task.n_block, tdKrdK, tdVrdV);
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
