// The Hopper forward with a mask: rows/kernel.cuh, where a warp walks over the bits of the mask's lists ahead of the
// thread that loads.
#pragma once

#include "core/registers.cuh"
#include "load.cuh"
#include "mainloop.cuh"
#include "seeing_rows.cuh"
#include "walk.cuh"
#include "sm90/common/dependent_launch.cuh"
#include "sm90/forward/rows/epilogue.cuh"

namespace flash_cute::sm90::forward::masked_rows {

template <class Traits>
CUTE_DEVICE void consumer(KernelArgs const& args, typename Traits::SharedStorage& smem, int warpgroup) {
  TurnRing<Traits::kWarpgroups, Traits::kTile.ping_pong>::start(warpgroup);
  typename Traits::MmaPV mma;
  WarpgroupTile read;
#pragma unroll 1
  for (int tile_number = 0;; ++tile_number) {
    read.read(smem, tile_number);
    if (!read.exists) break;
    OnlineSoftmax<2> softmax(args.params.scale_log2, args.params.power_scale);
    auto tOrO = partition_fragment_C(mma, Shape<Int<Traits::kRows>, Int<Traits::kHeadDimV>>{});  // (MMA, MMA_M, MMA_D)
    mainloop<Traits>(args.params, tile_number, warpgroup, smem, read, softmax, tOrO);
    TileCoord volatile& tile = smem.tile[opaque(tile_number) & 1];
    TileCoord const coord{
        .m_block = uniform(tile.m_block), .head = uniform(tile.head), .batch = uniform(tile.batch)};
    rows::epilogue<Traits>(args.params, find_seeing_rows<Traits>(args.params, coord, warpgroup, softmax), coord,
                           warpgroup, smem, softmax, tOrO);
    smem.tile_pipeline.release(at_step(tile_number));  // the walker may overwrite the tile
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) fwd_kernel(__grid_constant__ KernelArgs const args) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_raw);
  int const warpgroup = uniform(threadIdx.x / 128);

  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(&args.q);
    prefetch_tma_descriptor(&args.k);
    prefetch_tma_descriptor(&args.v);
    smem.k_pipeline.init(4 * Traits::kWarpgroups);
    smem.v_pipeline.init(4 * Traits::kWarpgroups);
    for (auto& pipeline : smem.q_pipeline) pipeline.init(4);
    smem.tile_pipeline.init(4 * Traits::kWarpgroups + 1);  // the consumers' warps and the loading thread
    smem.batch_pipeline.init(1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes the barriers visible to TMA
  }
  wait_for_kernel_before();  // which makes the mask's lists and zeroes the counter
  __syncthreads();  // thread 0 has initialised the barriers

  if (warpgroup == 0) {
    lower_max_registers<Traits::kProducerRegs>();
    if (uniform(threadIdx.x / 32) == 1) Walker<Traits>(args.params, smem).run();
    if (threadIdx.x == 0) Loader<Traits>(args, smem).run();
  } else {
    raise_max_registers<Traits::kConsumerRegs>();
    consumer<Traits>(args, smem, warpgroup - 1);
  }
}

}  // namespace flash_cute::sm90::forward::masked_rows
