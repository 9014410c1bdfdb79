// The Hopper forward: persistent CTAs of one producer warpgroup, of which one thread issues all TMA loads, and one to
// four consumer warpgroups with 64 query rows of a tile each. The producer gives registers to the consumers
// (setmaxnreg). Where sequences are read at run time, another warp of the producer warpgroup schedules the tiles.
#pragma once

#include "core/registers.cuh"
#include "sm90/forward/common/args.cuh"
#include "epilogue.cuh"
#include "mainloop.cuh"
#include "sm90/forward/common/place.cuh"
#include "sm90/forward/common/producer.cuh"
#include "split.cuh"
#include "traits.cuh"
#include "sm90/common/dependent_launch.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::forward::rows {

template <class Traits>
CUTE_DEVICE void consumer(FwdParams const& params, typename Traits::SharedStorage& smem, int warpgroup) {
  TurnRing<Traits::kWarpgroups, Traits::kTile.ping_pong>::start(warpgroup);
  typename Traits::MmaPV mma;
  WarpgroupKeys<Traits> tiles;
  if constexpr (Traits::kReadsAhead) tiles.read(params, smem, 0, warpgroup);
#pragma unroll 1
  for (int tile_number = 0;; ++tile_number) {
    if constexpr (!Traits::kReadsAhead) tiles.read(params, smem, tile_number, warpgroup);
    if (!tiles.exists) break;
    OnlineSoftmax<2> softmax = softmax_of(params, smem.tile[opaque(tile_number) & 1]);
    auto tOrO = partition_fragment_C(mma, Shape<Int<Traits::kRows>, Int<Traits::kHeadDimV>>{});  // (MMA, MMA_M, MMA_D)
    mainloop<Traits>(params, tile_number, warpgroup, smem, tiles, softmax, tOrO);
    int const parts = parts_of(smem.tile[opaque(tile_number) & 1]);
    if (parts < 0) store_part<Traits>(params, smem.range, warpgroup, softmax, tOrO);
    if (parts > 0) merge_parts<Traits>(params, smem.range, parts, warpgroup, softmax, tOrO);
    if (parts >= 0) {
      scale_values(smem.tile[opaque(tile_number) & 1], tOrO);
      // Recomputed: kept across the merge, it spilled.
      TileCoord const volatile& tile = smem.tile[opaque(tile_number) & 1];
      TileCoord const coord{.m_block = uniform(tile.m_block),
                            .head = warpgroup_head<Traits>(params, uniform(tile.head), warpgroup),
                            .batch = uniform(tile.batch)};
      auto const& lengths = copy_of_lengths(params, smem.tile[opaque(tile_number) & 1]);
      epilogue<Traits>(params, lengths, coord, warpgroup, smem, softmax, tOrO);
    }
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
    smem.v_pipeline.init(4 * Traits::kWarpgroups);
    for (auto& pipeline : smem.q_pipeline) pipeline.init(4);
    init_tile_barriers(smem, 4 * Traits::kWarpgroups, smem.tile[0]);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes the barriers visible to TMA
  }
  wait_for_kernel_before();  // which zeroes counters and flags, if there are any
  __syncthreads();  // thread 0 has initialised the barriers

  if (warpgroup == 0) {
    lower_max_registers<Traits::kProducerRegs>();
    run_producer_warp<Traits>(args, smem, uniform(threadIdx.x / 32), smem.tile[0]);
  } else {
    raise_max_registers<Traits::kConsumerRegs>();
    consumer<Traits>(args.params, smem, warpgroup - 1);
  }
}

}  // namespace flash_cute::sm90::forward::rows
