// Types of one sm90 forward kernel: tile, MMAs, shared memory.
#pragma once

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "sm90/forward/common/scheduler.cuh"
#include "tile.h"
#include "contract/variant.h"
#include "sm90/common/pipeline.cuh"
#include "sm90/common/wgmma_atoms.cuh"

namespace flash_cute::sm90::forward::rows {

using namespace cute;

// O on its way from registers to global memory: 16 rows of each warp, in pieces of 8 columns.
template <int kWarpgroups, int kHeadDim>
struct OutBuffer {
  uint4 rows[kWarpgroups][4][16 * kHeadDim / 8];
};
struct NoOutBuffer {};

template <class Element_, int kHeadDim_, TileConfig kTile_, Variant kVariant_ = Variant::kDense,
          int kHeadDimV_ = kHeadDim_>
struct Traits {
  using Element = Element_;
  using Result = Element;  // of O
  static constexpr TileConfig kTile = kTile_;
  static constexpr Variant kVariant = kVariant_;
  static constexpr int kHeadDim = kHeadDim_;    // of Q and K
  static constexpr int kHeadDimV = kHeadDimV_;  // of V and O
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kRows = 64;  // query rows per consumer warpgroup: the M of one WGMMA
  static constexpr int kWarpgroups = kBlockM / kRows;
  static constexpr int kConsumerThreads = 128 * kWarpgroups;
  static constexpr int kThreads = 128 + kConsumerThreads;
  static_assert(kBlockM % kRows == 0 && kWarpgroups <= 4 && kBlockN % 16 == 0);
  static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0);
  static_assert(!kTile.ping_pong || kWarpgroups > 1);
  // A softcap's polynomial is part of the exponential's argument, see capped_scores.cuh: 7 to 12 % faster at head dim
  // 128. Above, where the tensor cores bound the kernel and leave room for capping the scores first, it is 2 to 5 %
  // slower; the tile of 192 rows of head dim 96 spills with it.
  static constexpr bool kFoldsSoftcap =
      kVariant.modifies_scores && kHeadDim <= 128 && !(kHeadDim == 96 && kBlockM == 192);

  // Q's descriptors are computed again in each step: there are too few registers to keep them.
  static constexpr bool kComputesDescriptors = kHeadDim > 256 || (kVariant.modifies_scores && kHeadDim > 128);

  // Whether a warpgroup reads what it needs to know of its next tile under the last product of a tile. Above head dim
  // 128 and with four warpgroups there are too few registers to keep it during the epilogue; sequences' tiles are
  // published too late for that.
  static constexpr bool kReadsAhead = kHeadDim <= 128 && kWarpgroups < 4 && !kVariant.reads_sequences;

  static constexpr bool kConvertsQueries = false;  // Q has the type of the products when it lands

  static constexpr bool kValuesFirst = false;  // K of the next key tile is used before V

  static constexpr int kTileHeads = kVariant.reads_sequences ? 1 : most_tile_heads(kBlockM);

  // Registers per thread, by setmaxnreg in steps of 8. A CTA starts with the same number for every thread (65536 /
  // kThreads, rounded down to a multiple of 8), and the consumers can get only what the producer gives up: asking for
  // more hangs. Two warpgroups need 240 only above head dim 128; with 24, the producer of the other kernels spills.
  // The scheduler of sequences that are read at run time needs more than 24, too.
  static constexpr bool kLargeAcc = kHeadDimV > 128 && !kVariant.reads_sequences;
  static constexpr int kProducerRegs = kWarpgroups == 1 ? 56 : kWarpgroups > 2 ? 32 : kLargeAcc ? 24 : 40;
  static constexpr int kConsumerRegs =
      kWarpgroups == 1 ? 256 : kWarpgroups == 3 ? 160 : kWarpgroups == 4 ? 112 : kLargeAcc ? 240 : 232;

  // S = Q K^T from shared memory; O += P V with P in registers and V read transposed.
  using MmaQK = decltype(make_tiled_mma(wgmma_ss_atom<Element, kBlockN>()));
  using MmaPV = decltype(make_tiled_mma(
      SM90::GMMA::rs_op_selector<Element, Element, float, Shape<Int<kRows>, Int<kHeadDimV>, Int<kBlockN>>,
                                 SM90::GMMA::Major::K, SM90::GMMA::Major::MN>()));

  // A tile is stored in chunks of columns, one chunk after the other: a chunk is what one TMA box writes, and what
  // WGMMA reads as K-major (Q, K) or, through the other atom, as MN-major (V).
  template <int kColumns>
  struct Columns {
    using Element = Element_;
    static constexpr int kChunk = kColumns % 64 == 0 ? 64 : 32;
    static constexpr int kChunks = kColumns / kChunk;
  };
  using ColumnsQK = Columns<kHeadDim>;
  using ColumnsV = Columns<kHeadDimV>;
  using AtomK = std::conditional_t<ColumnsQK::kChunk == 64, SM90::GMMA::Layout_K_SW128_Atom<Element>,
                                   SM90::GMMA::Layout_K_SW64_Atom<Element>>;
  using AtomV = std::conditional_t<ColumnsV::kChunk == 64, SM90::GMMA::Layout_MN_SW128_Atom<Element>,
                                   SM90::GMMA::Layout_MN_SW64_Atom<Element>>;
  using SmemLayoutQ = decltype(tile_to_shape(AtomK{}, Shape<Int<kRows>, Int<kHeadDim>>{}));
  using SmemLayoutK = decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
  using SmemLayoutVt = decltype(tile_to_shape(AtomV{}, Shape<Int<kHeadDimV>, Int<kBlockN>, Int<kStages>>{},
                                              Step<_2, _1, _3>{}));

  static constexpr SmemBytes kSmem{kTile, kHeadDim, kHeadDimV};
  // Whether O passes through its buffer. With modified scores the tile of 192 rows of head dim 128 has too few
  // registers for that: it spilled.
  static constexpr bool kOutThroughSmem =
      kSmem.has_o && !(kVariant.modifies_scores && kHeadDim == 128 && kBlockM == 192);

  static constexpr int kQElements = kRows * kHeadDim;
  static constexpr int kKElements = kBlockN * kHeadDim;
  static constexpr int kVElements = kBlockN * kHeadDimV;

  using Tile = std::conditional_t<kVariant.reads_sequences, SequenceTile, TileCoord>;

  // `TilePipeline`: of K and V.
  template <class TilePipeline>
  struct alignas(1024) Storage {
    Element k[kStages][kKElements];
    Element v[kStages][kVElements];
    Element q[kSmem.q_stages][kWarpgroups][kQElements];
    std::conditional_t<kSmem.has_o, OutBuffer<kWarpgroups, kHeadDimV>, NoOutBuffer> out;
    TilePipeline k_pipeline;
    TilePipeline v_pipeline;
    Pipeline<kSmem.q_stages> q_pipeline[kWarpgroups];
    Tile tile[2];
    Pipeline<2> tile_pipeline;
    // What a lane of the scheduler of sequences knows of its sequence: the warp has no registers for it.
    Floors floors[32];
    TileNumbers own_tiles[32];
    int range;  // this CTA's range of the split tiles; negative: none
    Pipeline<1> next_tile;  // full: the producer will soon have loaded its tile. Where sequences are read at run time
  };
  using SharedStorage = Storage<Pipeline<kStages>>;
  static_assert(sizeof(SharedStorage) == kSmem.total);

  // The buffer of Q of a tile.
  CUTE_DEVICE static PipelineState<kSmem.q_stages> q_state(int tile_number) {
    if constexpr (kSmem.q_stages == 2) {
      return at_step(tile_number);
    } else {
      return {0, tile_number & 1};
    }
  }
};

}  // namespace flash_cute::sm90::forward::rows
