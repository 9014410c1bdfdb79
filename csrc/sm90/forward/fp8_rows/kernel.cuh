// The Hopper forward in float8: the persistent CTAs of rows/kernel.cuh, with two more warps of the producer warpgroup
// at work, which transpose V.
#pragma once

#include "args.cuh"
#include "core/registers.cuh"
#include "epilogue.cuh"
#include "mainloop.cuh"
#include "sm90/common/dependent_launch.cuh"
#include "sm90/common/warpgroup.cuh"
#include "sm90/forward/common/producer.cuh"
#include "traits.cuh"
#include "transpose.cuh"

namespace flash_cute::sm90::forward::fp8_rows {

template <class Traits>
CUTE_DEVICE void consumer(KernelArgs const& args, typename Traits::SharedStorage& smem, int warpgroup) {
#pragma unroll 1
  for (int tile_number = 0;; ++tile_number) {
    WarpgroupKeys<Traits> tiles;
    tiles.read(args.params, smem, tile_number, warpgroup);
    if (!tiles.exists) break;
    Softmax<Traits::kExactLse> softmax;
    auto tOrO = make_tensor<float>(typename Traits::LayoutO{});  // (MMA, MMA_M, MMA_D)
    mainloop<Traits>(args.params, args.fp8, tile_number, warpgroup, smem, tiles, softmax, tOrO);
    TileCoord const volatile& tile = smem.tile[opaque(tile_number) & 1];
    TileCoord const coord{.m_block = uniform(tile.m_block),
                          .head = uniform(tile.head),
                          .head_kv = uniform(tile.head_kv),
                          .batch = uniform(tile.batch)};
    auto const& lengths = copy_of_lengths(args.params, smem.tile[opaque(tile_number) & 1]);
    epilogue<Traits>(args.params, args.fp8, lengths, coord, warpgroup, softmax, tOrO);
    smem.tile_pipeline.release(at_step(tile_number));  // the producer may overwrite the tile
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
    smem.v_pipeline.init(Traits::kTransposers);
    smem.vt_pipeline.init(4 * Traits::kWarpgroups, Traits::kTransposers);
    for (auto& pipeline : smem.q_pipeline) pipeline.init(4);
    init_tile_barriers(smem, 4 * Traits::kWarpgroups + Traits::kTransposers, smem.tile[0]);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes the barriers visible to TMA
  }
  if constexpr (Traits::kTile.sum_columns() > 0) {
    write_sum_columns<Traits>(smem);
  } else {
    if (threadIdx.x < sizeof(smem.ones) / 4) reinterpret_cast<uint32_t*>(smem.ones)[threadIdx.x] = Traits::kFourOnes;
  }
  tma_store_fence();         // before WGMMA reads the ones
  wait_for_kernel_before();  // which zeroes counters and flags, if there are any
  __syncthreads();           // barriers and ones have been written

  if (warpgroup == 0) {
    lower_max_registers<Traits::kProducerRegs>();
    int const warp = uniform(threadIdx.x / 32);
    if (warp >= 2) transpose_values<Traits>(smem, warp - 2);
    run_producer_warp<Traits>(args, smem, warp, smem.tile[0]);
  } else {
    raise_max_registers<Traits::kConsumerRegs>();
    consumer<Traits>(args, smem, warpgroup - 1);
  }
}

}  // namespace flash_cute::sm90::forward::fp8_rows
