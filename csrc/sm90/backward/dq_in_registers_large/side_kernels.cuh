// The kernels of dK and dV, and of dQ, above head dim 320. A cluster owns 64 keys, or 64 query rows, and loops over the
// row tiles of all query heads that read the keys, or over the key tiles that the rows see, from the last to the first.
// side_traits.cuh says what its CTAs do. Of a CTA's four warpgroups one loads, one makes P and dS, two multiply.
//
// Both kernels have the same frame of fifteen lines. As a function it would take five others as arguments, and each
// kernel would be read in two places.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/common/store_tma.cuh"
#include "side_load.cuh"
#include "side_products.cuh"
#include "side_scores.cuh"

namespace flash_cute::sm90::backward::dq_in_registers_large {

// Where a gradient's tile is, and how many of its rows the sequence uses. Rows from there on get 0, even if the
// sequence has a NaN.
struct ResultTile {
  int row;
  int used;
  int head;
  SequenceOrigin origin;
};

// Stores a warpgroup's sums times `factor` through the buffers of the cluster's own tile, which no product reads any
// more: all scores have been computed before the last W.
template <class Traits, class Storage>
CUTE_DEVICE void store_side_sums(CUtensorMap const& map, Storage& smem, int warpgroup, SideSums<Traits>& sums,
                                 float factor, ResultTile const& tile) {
  int const thread = fresh_thread_index() % 128;
  typename Traits::MmaSums mma;
  auto cSums = make_identity_tensor(Shape<_64, Int<Traits::kUnitColumns>>{});    // -> (row, column)
  auto const coords = rowcol_view(mma.get_slice(thread).partition_C(cSums));
  int const first_unit = warpgroup * Traits::kUnitsOfSums;
  CUTE_UNROLL
  for (int unit = 0; unit < Traits::kUnitsOfSums; ++unit) {
    auto acc = rowcol_view(sums.units[unit]);  // (rows, columns)
    CUTE_UNROLL
    for (int i = 0; i < size<0>(acc); ++i) {
      if (tile.row + int{get<0>(coords(i, _0{}))} < tile.used) continue;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(acc); ++j) acc(i, j) = 0.f;
    }
    stage_rows<typename Traits::MmaSums, typename Traits::SmemLayout>(smem.resident[first_unit + unit], thread,
                                                                      sums.units[unit], factor);
  }
  tma_store_fence();
  named_sync(kResults + warpgroup, 128);  // all threads of the warpgroup have written their share
  if (thread == 0) {
    CUTE_UNROLL
    for (int column = 0; column < Traits::kUnitsOfSums * Traits::kUnitColumns; column += Traits::kChunk) {
      SM90_TMA_STORE_5D::copy(&map, smem.resident[first_unit] + kTileRows * column,
                              first_column_of_side<Traits>() + first_unit * Traits::kUnitColumns + column,
                              tile.origin.row + tile.row, tile.head, tile.origin.last, tile.origin.back);
    }
    tma_store_arrive();
    tma_store_wait<0>();  // shared memory must live until the TMA store has read it
  }
}

template <class Storage>
CUTE_DEVICE void init_side(KernelArgs const& args, Storage& smem) {
  prefetch_tma_descriptor(&args.q);
  prefetch_tma_descriptor(&args.dout);
  prefetch_tma_descriptor(&args.k);
  prefetch_tma_descriptor(&args.v);
  smem.init();
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes them visible to TMA and the cluster
}

// Grid: (key tiles of all KV heads x CTAs per tile), in clusters.
template <class Traits>
  requires(Traits::kCtas > 1)
__global__ void __launch_bounds__(Traits::kThreads, 1) bwd_keys_kernel(__grid_constant__ KernelArgs const args) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::KeysStorage*>(smem_raw);
  int const warpgroup = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    find_key_tile(args.params, blockIdx.x / Traits::kCtas, smem.tile);
    init_side(args, smem);
  }
  cluster_sync();  // the CTAs' threads 0 have written the tile and initialised the barriers
  if (smem.tile.n_block < 0) return;  // there are fewer tiles than clusters

  if (warpgroup == 0) {
    lower_max_registers<Traits::kProducerRegs>();
    if (threadIdx.x == 0) load_keys_side<Traits>(args, smem);
  } else if (warpgroup == 1) {
    lower_max_registers<Traits::kScoresRegs>();
    make_scores_of_keys<Traits>(args, smem);
  } else {
    raise_max_registers<Traits::kProductsRegs>();
    KeyTile const volatile& tile = smem.tile;
    SideSums<Traits> sums;
    compute_products<Traits, ReadW::kAfterScores>(smem, row_steps(args.params, tile), warpgroup - 2, sums);
    ResultTile const result{.row = tile.n_block * kTileRows,
                            .used = tile.sequence.len_k,
                            .head = tile.head_kv,
                            .origin = origin_of_gradients(args.params, smem.tile)};
    if (side() == kSideS) {
      store_side_sums<Traits>(args.dk, smem, warpgroup - 2, sums, args.params.scale, result);
    } else {
      store_side_sums<Traits>(args.dv, smem, warpgroup - 2, sums, 1.f, result);
    }
  }
  __syncwarp();
  cluster_sync();  // a CTA's shared memory must not be gone before what others send has arrived
}

// Grid: (row tiles of all query heads x CTAs per tile), in clusters.
template <class Traits>
  requires(Traits::kCtas > 1)
__global__ void __launch_bounds__(Traits::kThreads, 1) bwd_queries_kernel(__grid_constant__ KernelArgs const args) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::QueriesStorage*>(smem_raw);
  int const warpgroup = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    find_row_tile(args.params, blockIdx.x / Traits::kCtas, smem.tile);
    init_side(args, smem);
  }
  cluster_sync();  // the CTAs' threads 0 have written the tile and initialised the barriers
  if (smem.tile.m_block < 0) return;  // there are fewer tiles than clusters

  if (warpgroup == 0) {
    lower_max_registers<Traits::kProducerRegs>();
    if (threadIdx.x == 0) load_queries_side<Traits>(args, smem);
  } else if (warpgroup == 1) {
    lower_max_registers<Traits::kScoresRegs>();
    make_scores_of_queries<Traits>(args, smem);
  } else {
    raise_max_registers<Traits::kProductsRegs>();
    RowTileTask const volatile& tile = smem.tile;
    if (side() == kSideS) {
      SideSums<Traits> sums;
      compute_products<Traits, ReadW::kUnderScores>(smem, key_steps(tile), warpgroup - 2, sums);
      Sequence const& sequence = smem.tile.sequence;
      store_side_sums<Traits>(args.dq, smem, warpgroup - 2, sums, args.params.scale,
                              {.row = tile.m_block * kTileRows,
                               .used = sequence.len_q,
                               .head = tile.head,
                               .origin = sequence_origin(args.params, smem.tile, sequence.first_row, sequence.rows)});
    } else {
      NoSums none;
      compute_products<Traits, ReadW::kAfterScores>(smem, key_steps(tile), warpgroup - 2, none);
    }
  }
  __syncwarp();
  cluster_sync();  // a CTA's shared memory must not be gone before what others send has arrived
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
