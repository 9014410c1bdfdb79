// Types of the sm90 forward for head dims above 512: MMAs, shared memory.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "contract/variant.h"
#include "sm90/forward/pair/key_walk.cuh"
#include "sm90/forward/pair/pair.cuh"
#include "sm90/common/pipeline.cuh"
#include "sm90/common/wgmma_atoms.cuh"
#include "tile.h"

namespace flash_cute::sm90::forward::pair_by_columns {

using namespace cute;

template <class Element_, int kHeadDim_, Variant kVariant_>
struct Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Variant kVariant = kVariant_;
  static_assert(kVariant.reads_sequences, "dense batches run in the packed kernel");
  static constexpr int kBlockM = pair_by_columns::kBlockM;
  static constexpr int kBlockN = pair_by_columns::kBlockN;
  static constexpr int kRows = kBlockM;  // of a warpgroup, and of a box of Q
  static constexpr int kUnitKeys = pair_by_columns::kUnitKeys;
  static constexpr int kSmemBytes = pair_by_columns::kSmemBytes;
  static constexpr int kCtas = pair_by_columns::kCtas;
  static_assert(kHeadDim <= kCtas * kColumns);
  static constexpr int kWarpgroups = pair_by_columns::kWarpgroups;
  static constexpr int kThreads = pair_by_columns::kThreads;

  // Registers per thread, by setmaxnreg, see rows/traits.cuh. The scheduler needs more than 24.
  static constexpr int kProducerRegs = 40;
  static constexpr int kConsumerRegs = 232;

  // S = Q K^T from shared memory; O += P V with P in registers for the warpgroup that computed it, else in shared
  // memory, and V read transposed.
  using MmaQK = decltype(make_tiled_mma(wgmma_ss_atom<Element, kBlockN>()));
  using ShapePV = Shape<Int<kBlockM>, Int<kUnitColumnsOfV>, Int<kBlockN>>;
  using MmaPV = decltype(make_tiled_mma(
      SM90::GMMA::rs_op_selector<Element, Element, float, ShapePV, SM90::GMMA::Major::K, SM90::GMMA::Major::MN>()));
  using MmaSharedPV = decltype(make_tiled_mma(
      SM90::GMMA::ss_op_selector<Element, Element, float, ShapePV, SM90::GMMA::Major::K, SM90::GMMA::Major::MN>()));

  // One TMA box writes 64 columns; a unit and Q have one box after the other.
  static constexpr int kChunk = 64;
  using AtomK = SM90::GMMA::Layout_K_SW128_Atom<Element>;
  using AtomV = SM90::GMMA::Layout_MN_SW128_Atom<Element>;
  using SmemLayoutQ =
      decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockM>, Int<kUnitColumns>, Int<kColumns / kUnitColumns>>{}));
  using SmemLayoutK = decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockN>, Int<kUnitColumns>, Int<kUnitsOfK>>{}));
  using SmemLayoutVt =
      decltype(tile_to_shape(AtomV{}, Shape<Int<kUnitColumnsOfV>, Int<kUnitKeys>, Int<kUnitsOfVRing>>{},
                             Step<_2, _1, _3>{}));
  using SmemLayoutP = decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockM>, Int<kBlockN>>{}));

  using Tile = pair::RowTile;

  struct alignas(1024) SharedStorage {
    Element q[kBlockM * kColumns];
    Element k[kUnitsOfK][kUnitElements];
    Element v[2][kUnitsOfVRing][kUnitElements];  // by the half of the columns
    alignas(1024) char p[2][kScoreBytes];  // by the warpgroup that wrote it. Before it: the other CTA's part of S
    float2 rows[2][kBlockM];          // the same: maximum in use and limit of a row after its step; sums at the end
    alignas(4) bool grown[2][4];      // the same, by the warp: a maximum has grown in its step
    Pipeline<1> scores_pipeline[2];   // by the warpgroup. full: they have arrived; empty: the other's buffer is free
    pair::PairTicket ticket;
    Pipeline<kUnitsOfK> k_pipeline[2];  // by the warpgroup that reads the tile
    Pipeline<kUnitsOfVRing> v_pipeline[2];
    Pipeline<1> q_pipeline;
    Pipeline<1> message[2];           // p, rows and grown, by the warpgroup that wrote them
    Tile tile[2];
    Pipeline<2> tile_pipeline;
    Floors floors[32];  // of the sequence of each lane of the scheduler
    Pipeline<1> next_tile;  // full: the producer will soon have loaded its tile

    CUTE_DEVICE void init() {
      for (auto& pipeline : k_pipeline) pipeline.init(4);
      for (auto& pipeline : v_pipeline) pipeline.init(4);
      q_pipeline.init(4 * kWarpgroups);
      for (auto& pipeline : message) pipeline.init(4, 4);
      tile_pipeline.init(4 * kWarpgroups + 3);
      next_tile.init(1);
      for (auto& pipeline : scores_pipeline) pipeline.init(4);
      ticket.pipeline.init(1);
    }
  };
  static_assert(sizeof(SharedStorage) == kSmemBytes);
};

// The units per tile of K that each of the CTAs of a row tile loads. The last one's may be past the end.
CUTE_DEVICE int units_of_k(FwdParams const& params) {
  constexpr int kUnitOfAll = kUnitColumns * kCtas;
  return (params.head_dim + kUnitOfAll - 1) / kUnitOfAll;
}

// A warpgroup has one part of the columns of V and O, kUnitColumnsOfV, where v's head dim is at most 512, else two.
CUTE_DEVICE int parts_of_v(FwdParams const& params) {
  return params.head_dim_v <= kCtas * kWarpgroups * kUnitColumnsOfV ? 1 : 2;
}

}  // namespace flash_cute::sm90::forward::pair_by_columns
