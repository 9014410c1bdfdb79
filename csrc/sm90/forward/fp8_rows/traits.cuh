// Types of one sm90 forward kernel in float8: tile, MMAs, shared memory.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "contract/fp8.h"
#include "sm90/common/pipeline.cuh"
#include "sm90/forward/common/scheduler.cuh"
#include "tile.h"
#include "wgmma_atoms.cuh"

namespace flash_cute::sm90::forward::fp8_rows {

using namespace cute;

// The formats of q, k and v, which the MMAs alone tell apart.
template <class Q_, class K_, class V_>
struct Formats {
  using Q = Q_;
  using K = K_;
  using V = V_;
};
using E4M3 = cutlass::float_e4m3_t;
using E5M2 = cutlass::float_e5m2_t;

// `kExactLse`: whether the LSE is of the unrounded numerators, see softmax.cuh.
template <int kHeadDim_, int kHeadDimV_, Variant kVariant_, class Formats, bool kExactLse_>
struct Traits {
  using Element = E4M3;  // P's, and eight bits of any format
  static constexpr TileConfig kTile = tile_config(kHeadDimV_, kVariant_.modifies_scores);
  static constexpr Variant kVariant = kVariant_;
  static constexpr bool kExactLse = kExactLse_;
  static constexpr int kHeadDim = kHeadDim_;    // of Q and K
  static constexpr int kHeadDimV = kHeadDimV_;  // of V and O
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kPieces = kTile.pieces;
  static constexpr int kPiece = kHeadDimV / kPieces;  // columns of V in one product
  static constexpr int kProduct = kPiece + kTile.sum_columns();
  static constexpr int kStages = TileConfig::kStages;
  static constexpr int kRows = 64;  // query rows per consumer warpgroup: the M of one WGMMA
  static constexpr int kWarpgroups = kBlockM / kRows;
  static constexpr int kConsumerThreads = 128 * kWarpgroups;
  static constexpr int kThreads = 128 + kConsumerThreads;
  static constexpr int kTransposers = 2;  // warps of the producer warpgroup, beside those that load and schedule
  static_assert(kBlockM % kRows == 0 && kWarpgroups <= 4 && kBlockN % 32 == 0 && Fp8Terms::kBlock % kBlockN == 0);
  static_assert(kHeadDim % 32 == 0 && kHeadDimV % kPieces == 0);

  // A tile's V is loaded before the next tile's K, which waits for a buffer: there must be time to transpose it.
  static constexpr bool kValuesFirst = true;
  static constexpr int kTileHeads = 1;
  // Registers per thread, see rows/traits.cuh: the transposing warps need more than a producer alone.
  static constexpr int kProducerRegs = kWarpgroups >= 3 ? 32 : 40;
  static constexpr int kConsumerRegs = kWarpgroups == 4 ? 112 : kWarpgroups == 3 ? 160 : 232;
  // setmaxnreg waits, for ever if need be, for registers that are free: those that a CTA is launched with must suffice.
  static_assert(128 * (kProducerRegs + kWarpgroups * kConsumerRegs) <= 65536 / kThreads / 8 * 8 * kThreads);

  using MmaQK = decltype(make_tiled_mma(SM90::GMMA::ss_op_selector<typename Formats::Q, typename Formats::K, float,
                                                                   Shape<Int<kRows>, Int<kBlockN>, _32>>()));
  using MmaPV = decltype(make_tiled_mma(wgmma_rs_atom<typename Formats::V, kProduct>()));
  using MmaSum = decltype(make_tiled_mma(wgmma_rs_atom<typename Formats::V, 8>()));  // of P's rows: a product with ones
  static constexpr uint32_t kFourOnes = std::is_same_v<typename Formats::V, E4M3> ? 0x38383838u : 0x3c3c3c3cu;
  using LayoutP = Layout<Shape<Shape<_4, _2, _2>, _1, Int<kBlockN / 32>>>;   // the A operand: (MMA, MMA_M, MMA_N)
  using LayoutO = Layout<Shape<Shape<_2, _2, Int<kHeadDimV / 8>>, _1, _1>>;  // (MMA, MMA_M, MMA_D): all pieces'

  // A tile is stored in chunks of columns, one chunk after the other: a chunk is what one TMA box writes.
  template <int kColumns>
  struct Columns {
    using Element = Traits::Element;
    static constexpr int kChunk = kColumns % 128 == 0 ? 128 : kColumns % 64 == 0 ? 64 : 32;
    static constexpr int kChunks = kColumns / kChunk;
  };
  using ColumnsQK = Columns<kHeadDim>;
  using ColumnsV = Columns<kHeadDimV>;
  using KeyColumns = Columns<kBlockN>;  // of V transposed
  template <int kChunk>
  using AtomOf = std::conditional_t<
      kChunk == 128, SM90::GMMA::Layout_K_SW128_Atom<Element>,
      std::conditional_t<kChunk == 64, SM90::GMMA::Layout_K_SW64_Atom<Element>,
                         SM90::GMMA::Layout_K_SW32_Atom<Element>>>;
  using AtomQK = AtomOf<ColumnsQK::kChunk>;
  using SmemLayoutQ = decltype(tile_to_shape(AtomQK{}, Shape<Int<kRows>, Int<kHeadDim>>{}));
  using SmemLayoutK = decltype(tile_to_shape(AtomQK{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
  using SmemLayoutVt = decltype(tile_to_shape(AtomOf<KeyColumns::kChunk>{},
                                              Shape<Int<kProduct>, Int<kBlockN>, Int<kPieces>, Int<kStages>>{}));
  using SmemLayoutOnes = decltype(tile_to_shape(SM90::GMMA::Layout_K_SW32_Atom<Element>{}, Shape<_8, _32>{}));

  static constexpr SmemBytes kSmem{kTile, kHeadDim, kHeadDimV};
  static constexpr int kQElements = kRows * kHeadDim;
  static constexpr int kKElements = kBlockN * kHeadDim;
  static constexpr int kVElements = kBlockN * kHeadDimV;
  static constexpr int kVtElements = kBlockN * kProduct * kPieces;

  using Tile = std::conditional_t<kVariant.reads_sequences, SequenceTile, TileCoord>;

  struct alignas(1024) SharedStorage {
    Element k[kStages][kKElements];
    Element v[kStages][kVElements];    // rows of keys, as in memory
    Element vt[kStages][kVtElements];  // transposed, in the order of transpose.cuh; then the columns of ones
    Element q[kSmem.q_stages][kWarpgroups][kQElements];
    Element ones[256];
    Pipeline<kStages> k_pipeline;
    Pipeline<kStages> v_pipeline;
    Pipeline<kStages> vt_pipeline;
    Pipeline<kSmem.q_stages> q_pipeline[kWarpgroups];
    Tile tile[2];
    Pipeline<2> tile_pipeline;
    // As in rows/traits.cuh.
    Floors floors[32];
    TileNumbers own_tiles[32];
    int range;
    Pipeline<1> next_tile;
  };
  static_assert(sizeof(SharedStorage) <= kSmem.total);

  // The buffer of Q of a tile.
  CUTE_DEVICE static PipelineState<kSmem.q_stages> q_state(int tile_number) {
    if constexpr (kSmem.q_stages == 2) {
      return at_step(tile_number);
    } else {
      return {0, tile_number & 1};
    }
  }
};

}  // namespace flash_cute::sm90::forward::fp8_rows
