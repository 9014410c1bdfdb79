// Types of Hopper's kernels of latent attention over a cache: MMAs, shared memory.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "core/split_keys/fold.cuh"
#include "core/split_keys/work.cuh"
#include "sm90/common/pipeline.cuh"
#include "tile.h"

namespace flash_cute::sm90::decode::latent {

using namespace cute;
using flash_cute::split_keys::Unit;
using flash_cute::split_keys::Walk;

struct Cut {
  static constexpr int kTileKeys = latent::kTileKeys;
  static constexpr bool kRoundsRanges = true;
  static constexpr bool kMayCutAtRanges = true;
  static constexpr int kLeastRange = latent::kLeastRange;
  // Few rows take as long as many, but have small parts.
  CUTE_DEVICE static int tile_rows(DecodeParams const&, int rows) { return rows_of_tile(rows, kRows); }
  CUTE_DEVICE static int piece_tiles(DecodeParams const&, int rows, int tiles) {
    return rows <= kFewRows ? pieces_of_few().tiles(tiles) : pieces_of_many().tiles(tiles);
  }
};

template <class Element_, int kHeadDim_, int kHeadDimV_>
struct Traits {
  using Element = Element_;
  using Cut = latent::Cut;
  static constexpr int kHeadDimV = latent::kHeadDimV;
  static_assert(kHeadDim_ == kHeadDim && kHeadDimV_ == kHeadDimV);

  // S = Q K^T from shared memory; O += P V with P in registers, and V, which are columns of K, read transposed.
  static constexpr auto kK = SM90::GMMA::Major::K;
  static constexpr auto kMN = SM90::GMMA::Major::MN;
  using MmaQK = decltype(make_tiled_mma(
      SM90::GMMA::ss_op_selector<Element, Element, float, Shape<Int<kRows>, Int<kTileKeys>, Int<kChunk>>, kK, kK>()));
  using MmaPV = decltype(make_tiled_mma(
      SM90::GMMA::rs_op_selector<Element, Element, float, Shape<Int<kRows>, Int<kColumns>, Int<kTileKeys>>, kK,
                                 kMN>()));

  // Chunks of 64 columns, one after the other.
  using AtomK = SM90::GMMA::Layout_K_SW128_Atom<Element>;
  using AtomV = SM90::GMMA::Layout_MN_SW128_Atom<Element>;
  using SmemLayoutChunk = decltype(tile_to_shape(AtomK{}, Shape<Int<kTileKeys>, Int<kChunk>>{}));
  using SmemLayoutVt = decltype(tile_to_shape(AtomV{}, Shape<Int<kColumns>, Int<kTileKeys>>{}, Step<_2, _1>{}));
  static_assert(kRows == kTileKeys, "the chunks of Q are as those of K");

  struct SharedStorage {
    alignas(1024) Element q[kTileElements];
    Element tiles[kStages][kTileElements];
    // From the warpgroup that computed the scores of a tile to the other one: P and the rows' maxima. The threads of
    // both have the same elements, and each one's are in a place of its own.
    uint4 weights[4][128];
    float2 maxima[128];
    float sums[kWarpgroups][kRows];  // at the end of a piece: over the tiles of each warpgroup
    flash_cute::split_keys::RowState states[kRows];  // of the pieces so far
    uint64_t full[kStages][kChunks];
    uint64_t empty[kStages][kWarpgroups + 1];  // V's columns of each warpgroup; and the columns behind V
    uint64_t sent[kWarpgroups][4];             // a warp has sent a tile's weights
    Unit units[2];
    Pipeline<2> unit_pipeline;
    alignas(16) char walk[sizeof(Walk<Cut>)];  // the producer's: its registers have no room
  };
  static_assert(sizeof(SharedStorage) <= kSmemBytes);
};

}  // namespace flash_cute::sm90::decode::latent
