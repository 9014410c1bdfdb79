// Attention of long sequences over a KV cache: the forward of packed batches (sm90/forward/rows), whose K and V are in
// pages, and whose keys end where a cache does.
#pragma once

#include "core/registers.cuh"
#include "load.cuh"
#include "sm90/forward/rows/kernel.cuh"

namespace flash_cute::sm90::decode::long_rows {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    long_rows_kernel(__grid_constant__ typename Producers<Traits>::Args const args) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_raw);
  int const warpgroup = uniform(threadIdx.x / 128);

  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(&args.q);
    if constexpr (Producers<Traits>::kByTma) {
      prefetch_tma_descriptor(&args.k);
      prefetch_tma_descriptor(&args.v);
    }
    smem.k_pipeline.init(4 * Traits::kWarpgroups, Producers<Traits>::kTileArrivals);
    smem.v_pipeline.init(4 * Traits::kWarpgroups, Producers<Traits>::kTileArrivals);
    for (auto& pipeline : smem.q_pipeline) pipeline.init(4);
    smem.tile_pipeline.init(4 * Traits::kWarpgroups + Producers<Traits>::kLoadingWarps);
    Producers<Traits>::init(smem);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes the barriers visible to TMA
  }
  __syncthreads();  // thread 0 has initialised the barriers

  if (warpgroup == 0) {
    lower_max_registers<Traits::kProducerRegs>();
    int const warp = uniform(threadIdx.x / 32);
    if (warp == 0) {
      Producers<Traits>::first(args, smem);
    } else if (warp == 1) {
      schedule<Traits>(args.params, smem);
    } else if (warp == 2) {
      Producers<Traits>::second(args, smem);
    } else {
      Producers<Traits>::third(args, smem);
    }
  } else {
    raise_max_registers<Traits::kConsumerRegs>();
    forward::rows::consumer<Traits>(args.params, smem, warpgroup - 1);
  }
}

}  // namespace flash_cute::sm90::decode::long_rows
