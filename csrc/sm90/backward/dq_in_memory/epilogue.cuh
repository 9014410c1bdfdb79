// Stores dK and dV. Each warpgroup writes its own 64 rows to its dQ buffer in shared memory, and one thread issues TMA
// stores, which clip what is outside the tensor. The next key tile begins while the stores are in flight.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "task.cuh"
#include "dq.cuh"
#include "traits.cuh"
#include "sm90/common/store_tma.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

template <class Traits, class Accumulator>
CUTE_DEVICE void epilogue(KernelArgs const& args, KeyTile const& tile, int task_number,
                          typename Traits::SharedStorage& smem,
                          Accumulator const& tdKrdK,    // (MMA, MMA_N, MMA_D)
                          Accumulator const& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  using Element = typename Traits::Element;
  constexpr int kElements = Traits::kKeys * Traits::kHeadDim;
  int const thread = consumer_thread();
  int const warpgroup = thread / 128;
  using Mma = typename Traits::MmaOut;
  using Layout = typename Traits::SmemLayoutOut;
  CUTE_STATIC_ASSERT_V(size(tdKrdK) == size(tdVrdV));
  static_assert(sizeof(smem.dq[0][0]) >= 2 * kElements * sizeof(Element));
  auto const state = dq_state<Traits>(next_dq_step<Traits>(tile.end, warpgroup));
  auto* const dv = reinterpret_cast<Element*>(smem.dq[warpgroup][state.stage]);
  auto* const dk = dv + kElements;
  smem.dq_pipeline[warpgroup].wait_empty(state);  // the adding thread has read the dQ that this buffer held last
  stage_rows<Mma, Layout>(dv, thread % 128, tdVrdV, 1.f);
  stage_rows<Mma, Layout>(dk, thread % 128, tdKrdK, args.params.scale);
  tma_store_fence();
  named_sync(kResults + warpgroup, 128);  // all threads of the warpgroup have written their share of dK and dV
  if (thread % 128 == 0) {
    int const row = tile.n_block * Traits::kBlockN + warpgroup * Traits::kKeys;
    auto const origin = origin_of_results(args.params, smem.task[task_number & 1]);
    store_tile<Traits>(args.dv, dv, Traits::kKeys, row, tile.head_kv, origin);
    store_tile<Traits>(args.dk, dk, Traits::kKeys, row, tile.head_kv, origin);
    tma_store_arrive();
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_memory
