// Row-invariant attention, see tile.h: the forward of packed batches (sm90/forward/rows) over chunks of keys.
#pragma once

#include "core/registers.cuh"
#include "epilogue.cuh"
#include "fold.cuh"
#include "mainloop.cuh"
#include "pieces.cuh"
#include "schedule.cuh"
#include "sm90/common/dependent_launch.cuh"
#include "sm90/decode/long_rows/load.cuh"

namespace flash_cute::sm90::decode::key_chunks {

// A warpgroup's share of a row of heads and positions.
template <class Traits>
CUTE_DEVICE constexpr int query_bytes(Tile const& tile) {
  return tile.rows.heads * tile.rows.positions * Traits::kHeadDim * int{sizeof(typename Traits::Element)};
}
template <class Traits>
CUTE_DEVICE void load_queries(KernelArgs const& args, typename Traits::SharedStorage& smem, Tile const& tile,
                              int warpgroup, uint64_t* full, int stage) {
  using Columns = typename Traits::ColumnsQK;
  int const row = tile.sequence.first_row + (tile.m_block * Traits::kWarpgroups + warpgroup) * tile.rows.positions;
  int const batch = args.params.sequences.cu_q == nullptr ? tile.batch : 0;
  CUTE_UNROLL
  for (int chunk = 0; chunk < Columns::kChunks; ++chunk) {
    SM90_TMA_LOAD_4D::copy(&args.q, full, uint64_t(TMA::CacheHintSm90::EVICT_FIRST),
                           smem.queries(stage, warpgroup) + chunk * kRows * Columns::kChunk, chunk * Columns::kChunk,
                           tile.head, row, batch);
  }
}

template <class Traits>
CUTE_DEVICE void consumer(Params const& params, typename Traits::SharedStorage& smem, int warpgroup) {
  TurnRing<Traits::kWarpgroups, Traits::kTile.ping_pong>::start(warpgroup);
  typename Traits::MmaPV mma;
  forward::WarpgroupKeys<Traits> keys;
  keys.read(params, smem, 0, warpgroup);
#pragma unroll 1
  for (int tile_number = 0; keys.exists; ++tile_number) {
    OnlineSoftmax<2> softmax(params.scale_log2, params.power_scale);
    auto tOrO = partition_fragment_C(mma, Shape<Int<kRows>, Int<Traits::kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
    mainloop<Traits>(params, tile_number, warpgroup, smem, keys, softmax, tOrO);
    Tile const& tile = smem.tile[opaque(tile_number) & 1];
    int const fold = uniform(tile.fold);
    if (Traits::kChunks == Chunks::kOfOneCta && !is_last(fold)) {
      OwnFold<Traits> own(params, smem, warpgroup);
      begin_fold(own, softmax, tOrO);
    } else if (Traits::kChunks == Chunks::kOfOneCta && (fold & kToOther)) {
      hand_on_fold(Folds<Traits>{params.parts}, warpgroup, softmax, tOrO);
    } else if (Traits::kChunks == Chunks::kOfSeveral && (fold & kIsPart)) {
      store_part<Traits>(Part::of(params.parts, params.slots, Traits::kHeadDim, tile.part), params.slots.rows, softmax,
                         tOrO);
    } else {
      store_rows<Traits>(params, tile, warpgroup, smem, softmax, tOrO);
    }
    // The fold has been read: TMA may write Q to its memory.
    if constexpr (Traits::kSmem.has_fold) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();  // all lanes have read the tile
    smem.tile_pipeline.release(at_step(tile_number));  // the scheduler may overwrite it
    if constexpr (!Traits::kReadsNext) keys.read(params, smem, tile_number + 1, warpgroup);
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) chunks_kernel(__grid_constant__ KernelArgs const args) {
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
    smem.tile_pipeline.init(4 * Traits::kWarpgroups + long_rows::Producers<Traits>::kLoadingWarps);
    long_rows::edge_pipeline(smem).init(1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes the barriers visible to TMA
  }
  if constexpr (Traits::kChunks == Chunks::kOfOneCta) {
    if (threadIdx.x / 32 == 1) find_pieces<Traits>(args.params, smem);
    wait_for_kernel_before();  // which zeroes the flags
  }
  launch_dependents();
  __syncthreads();  // thread 0 has initialised the barriers, warp 1 has found the pieces

  if (warpgroup == 0) {
    lower_max_registers<Traits::kProducerRegs>();
    int const warp = uniform(threadIdx.x / 32);
    if (warp == 0) {
      long_rows::Loader<Traits, /*kValues=*/false, KernelArgs>(args, smem).run();
    } else if (warp == 1) {
      key_chunks::schedule<Traits>(args.params, smem);
    } else if (warp == 2) {
      long_rows::Loader<Traits, /*kValues=*/true, KernelArgs>(args, smem).run();
    }
  } else {
    raise_max_registers<Traits::kConsumerRegs>();
    consumer<Traits>(args.params, smem, warpgroup - 1);
  }
}

}  // namespace flash_cute::sm90::decode::key_chunks
