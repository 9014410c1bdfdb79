// Types of the sm90 forward for head dims above those of rows/, up to 512: MMAs, shared memory.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "contract/variant.h"
#include "sm90/forward/pair/key_walk.cuh"
#include "sm90/forward/pair/pair.cuh"
#include "sm90/common/pipeline.cuh"
#include "sm90/common/wgmma_atoms.cuh"
#include "tile.h"

namespace flash_cute::sm90::forward::pair_by_turns {

using namespace cute;

template <class Element_, int kHeadDim_, Variant kVariant_>
struct Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Variant kVariant = kVariant_;
  static_assert(kVariant.reads_sequences, "dense batches run in the packed kernel");
  static_assert(kHeadDim <= kMaxHeadDim);
  static constexpr int kBlockM = pair_by_turns::kBlockM;
  static constexpr int kBlockN = pair_by_turns::kBlockN;
  static constexpr int kRows = pair_by_turns::kRows;  // of a warpgroup, and of a box of Q
  static constexpr int kUnitKeys = kBlockN;  // of a box of V
  static constexpr int kSmemBytes = pair_by_turns::kSmemBytes;
  static constexpr int kCtas = pair_by_turns::kCtas;
  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = pair_by_turns::kThreads;
  static constexpr int kChunk = pair_by_turns::kChunk;

  // Registers per thread, by setmaxnreg, see rows/traits.cuh. The scheduler needs more than 24.
  static constexpr int kProducerRegs = 40;
  static constexpr int kConsumerRegs = 232;

  // S = Q K^T from shared memory; O += P V with P in registers and V read transposed.
  using MmaQK = decltype(make_tiled_mma(wgmma_ss_atom<Element, kBlockN>()));
  using ShapePV = Shape<Int<kRows>, Int<kChunk>, Int<kBlockN>>;
  using MmaPV = decltype(make_tiled_mma(
      SM90::GMMA::rs_op_selector<Element, Element, float, ShapePV, SM90::GMMA::Major::K, SM90::GMMA::Major::MN>()));

  // Boxes of kChunk columns, one after the other.
  using AtomK = SM90::GMMA::Layout_K_SW128_Atom<Element>;
  using AtomV = SM90::GMMA::Layout_MN_SW128_Atom<Element>;
  using SmemLayoutQ = decltype(tile_to_shape(AtomK{}, Shape<Int<kRows>, Int<kChunk>, Int<kMaxHeadDim / kChunk>>{}));
  using SmemLayoutK = decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockN>, Int<kChunk>, Int<kUnits>>{}));
  using SmemLayoutVt =
      decltype(tile_to_shape(AtomV{}, Shape<Int<kChunk>, Int<kBlockN>, Int<kUnits>>{}, Step<_2, _1, _3>{}));

  using Tile = pair::RowTile;

  static constexpr int kVectorsOfP = kRows * kBlockN / 128 / 8;  // a lane's, of 8 elements

  struct alignas(1024) SharedStorage {
    Element q[kWarpgroups][kRows * kMaxHeadDim];
    Element units[kUnits][kUnitElements];
    uint4 messages[kWarpgroups][4][(kVectorsOfP + 1) * 32];  // from the other CTA, by the warp: of a step
    uint4 sums[kWarpgroups][4][32];                        // the same: at the end of a tile
    Pipeline<kUnits> ring;
    Pipeline<1> q_pipeline;
    Pipeline<1> message_pipeline[kWarpgroups][4];  // without `empty`, see messages.cuh
    Pipeline<1> sums_pipeline[kWarpgroups][4];
    pair::PairTicket ticket;
    Tile tile[2];
    Pipeline<2> tile_pipeline;
    Floors floors[32];  // of the sequence of each lane of the scheduler
    Pipeline<1> next_tile;  // full: the producer will soon have loaded its tile

    CUTE_DEVICE void init() {
      ring.init(4 * kWarpgroups);
      q_pipeline.init(4 * kWarpgroups);
      for (auto& pipelines : message_pipeline) {
        for (auto& pipeline : pipelines) pipeline.init(1);
      }
      for (auto& pipelines : sums_pipeline) {
        for (auto& pipeline : pipelines) pipeline.init(1);
      }
      ticket.pipeline.init(1);
      tile_pipeline.init(4 * kWarpgroups + 1);
      next_tile.init(1);
    }
  };
  static_assert(sizeof(SharedStorage) == kSmemBytes);
};

// The units per tile of K, and chunks of Q.
CUTE_DEVICE int chunks_of_k(FwdParams const& params) { return (params.head_dim + kChunk - 1) / kChunk; }

}  // namespace flash_cute::sm90::forward::pair_by_turns
