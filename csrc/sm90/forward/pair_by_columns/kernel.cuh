// The Hopper forward for head dims above 512: persistent clusters of two CTAs with 64 query rows, each of which has half
// of the columns (see exchange.cuh), a producer warpgroup and two consumer warpgroups. The accumulator is too large for
// the registers of one warpgroup, so that each has half of its columns; the scores of the key tiles they compute by
// turns, see mainloop.cuh. Of the producer warpgroup three threads issue the TMA loads, one for each ring, and another
// warp schedules the tiles, as in rows/ where sequences are read at run time.
#pragma once

#include "core/registers.cuh"
#include "sm90/forward/common/args.cuh"
#include "sm90/forward/common/sequence_scheduler.cuh"
#include "sm90/forward/pair/epilogue.cuh"
#include "sm90/forward/pair/pair.cuh"
#include "sm90/common/warpgroup.cuh"
#include "load.cuh"
#include "mainloop.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::pair_by_columns {

template <class Traits, int kParts>
CUTE_DEVICE void consumer(KernelArgs const& args, typename Traits::SharedStorage& smem, int warpgroup) {
  constexpr int kHalf = kParts * kUnitColumnsOfV;  // columns of O
  typename Traits::MmaPV mma;
  RingStates states;
  Messages<Traits> messages{smem, warpgroup};
  ScoreExchange<Traits> exchange{smem, warpgroup};
#pragma unroll 1
  for (int tile_number = 0;; ++tile_number) {
    smem.tile_pipeline.wait_full(at_step(tile_number));  // the scheduler has written the tile
    if (uniform(smem.tile[tile_number & 1].m_block) < 0) break;
    OnlineSoftmax<2> softmax(args.params.scale_log2, args.params.power_scale);
    auto tOrO = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kHalf>>{});  // (MMA, MMA_M, MMA_D)
    mainloop<Traits, kParts>(args.params, tile_number, warpgroup, smem, states, messages, exchange, softmax, tOrO);
    pair::RowTile const& tile = smem.tile[opaque(tile_number) & 1];
    forward::TileCoord const coord{
        .m_block = uniform(tile.m_block), .head = uniform(tile.head), .batch = uniform(tile.batch)};
    Sequence const sequence = tile.sequence;
    int const first_column = (kWarpgroups * pair::rank_in_pair() + warpgroup) * kHalf;
    pair::store_columns<typename Traits::Element, kBlockM, kHalf>(
        args.params, sequence, coord, coord.m_block * kBlockM, first_column, softmax, mma, tOrO);
    smem.tile_pipeline.release(at_step(tile_number));  // the scheduler may overwrite the tile
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) fwd_pair_by_columns_kernel(__grid_constant__ KernelArgs const args) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_raw);
  int const warpgroup = uniform(threadIdx.x / 128);

  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(&args.q);
    prefetch_tma_descriptor(&args.k);
    prefetch_tma_descriptor(&args.v);
    for (auto& pipeline : smem.k_pipeline) pipeline.init(4);
    for (auto& pipeline : smem.v_pipeline) pipeline.init(4);
    smem.q_pipeline.init(4 * Traits::kWarpgroups);
    for (auto& message : smem.message) message.init(4, 4);
    smem.tile_pipeline.init(4 * Traits::kWarpgroups + 3);
    smem.next_tile.init(1);
    for (auto& pipeline : smem.scores_pipeline) pipeline.init(4);
    smem.ticket.pipeline.init(1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes the barriers visible to TMA
  }
  wait_for_kernel_before();  // which zeroes counters and flags, if there are any
  cluster_sync();            // thread 0 of both CTAs has initialised the barriers

  if (warpgroup == 0) {
    lower_max_registers<Traits::kProducerRegs>();
    if (uniform(threadIdx.x / 32) == 1) {
      forward::schedule_sequences<Traits>(args.params, smem, pair::PairTickets{smem.ticket});
    }
    if (threadIdx.x == 0) pair::produce<Traits>(args, smem, KeyLoader<Traits>{args, smem});
    if (threadIdx.x == 64) pair::produce<Traits>(args, smem, ValueLoader<Traits, 0>{args, smem});
    if (threadIdx.x == 96) pair::produce<Traits>(args, smem, ValueLoader<Traits, 1>{args, smem});
  } else {
    raise_max_registers<Traits::kConsumerRegs>();
    if (parts_of_v(args.params) == 1) {
      consumer<Traits, 1>(args, smem, warpgroup - 1);
    } else {
      consumer<Traits, 2>(args, smem, warpgroup - 1);
    }
  }
  __syncwarp();
  cluster_sync();  // a CTA's shared memory must not be gone before the other one's last arrival
}

}  // namespace flash_cute::sm90::forward::pair_by_columns
