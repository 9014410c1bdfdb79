// What the kernels of both families do alike: which warps load, schedule and compute, and the consumers' walk over the
// row tiles. A family's SharedStorage::init initialises its barriers.
#pragma once

#include "core/registers.cuh"
#include "core/softmax.cuh"
#include "sm90/common/dependent_launch.cuh"
#include "sm90/common/warpgroup.cuh"
#include "sm90/forward/common/args.cuh"
#include "sm90/forward/common/sequence_scheduler.cuh"
#include "epilogue.cuh"
#include "key_walk.cuh"
#include "pair.cuh"

namespace flash_cute::sm90::forward::pair {

using forward::KernelArgs;

// A consumer warpgroup. compute(tile_number, softmax, tOrO) leaves kRows x kColumns of O, which
// store(tile, coord, sequence, softmax, mma, tOrO) stores. Both are inlined.
template <class Traits, int kColumns, class Compute, class Store>
CUTE_DEVICE void for_each_tile(FwdParams const& params, typename Traits::SharedStorage& smem, Compute const& compute,
                               Store const& store) {
  typename Traits::MmaPV mma;
#pragma unroll 1
  for (int tile_number = 0;; ++tile_number) {
    smem.tile_pipeline.wait_full(at_step(tile_number));  // the scheduler has written the tile
    if (uniform(smem.tile[tile_number & 1].m_block) < 0) break;
    OnlineSoftmax<2> softmax(params.scale_log2, params.power_scale);
    auto tOrO = partition_fragment_C(mma, Shape<Int<Traits::kRows>, Int<kColumns>>{});  // (MMA, MMA_M, MMA_D)
    compute(tile_number, softmax, tOrO);
    RowTile const& tile = smem.tile[opaque(tile_number) & 1];
    forward::TileCoord const coord{
        .m_block = uniform(tile.m_block), .head = uniform(tile.head), .batch = uniform(tile.batch)};
    Sequence const sequence = tile.sequence;
    store(tile, coord, sequence, softmax, mma, tOrO);
    smem.tile_pipeline.release(at_step(tile_number));  // the scheduler may overwrite the tile
  }
}

// A CTA. load(smem) is called by the producer warpgroup, compute(smem, warpgroup) by each consumer warpgroup.
template <class Traits, class Load, class Compute>
CUTE_DEVICE void run_cta(KernelArgs const& args, Load const& load, Compute const& compute) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_raw);
  int const warpgroup = uniform(threadIdx.x / 128);

  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(&args.q);
    prefetch_tma_descriptor(&args.k);
    prefetch_tma_descriptor(&args.v);
    smem.init();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes the barriers visible to TMA
  }
  wait_for_kernel_before();  // which zeroes counters and flags, if there are any
  cluster_sync();            // thread 0 of both CTAs has initialised the barriers

  if (warpgroup == 0) {
    lower_max_registers<Traits::kProducerRegs>();
    if (uniform(threadIdx.x / 32) == 1) {
      forward::schedule_sequences<Traits>(args.params, smem, PairTickets{smem.ticket});
    }
    load(smem);
  } else {
    raise_max_registers<Traits::kConsumerRegs>();
    compute(smem, warpgroup - 1);
  }
  __syncwarp();
  cluster_sync();  // a CTA's shared memory must not be gone before the other one's last arrival
}

}  // namespace flash_cute::sm90::forward::pair
