// Types of the kernels for head dims above 320: MMAs, and their shared memory.
//
// A tile has CTAs of two sides in a cluster. Those of side S have K (dQ: Q) and stream Q (K), those of side dP have V
// (dO) and stream dO (V). Each computes a part of its side's scores, over its kColumns columns, and the sums that the
// streamed operand has a part in: dK and dQ on side S, dV on side dP.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "contract/variant.h"
#include "sm90/backward/common/args.cuh"
#include "sm90/common/cluster.cuh"
#include "sm90/common/pipeline.cuh"
#include "sm90/common/warpgroup.cuh"
#include "sm90/common/wgmma_atoms.cuh"
#include "handover.cuh"
#include "task.cuh"
#include "tile.h"

namespace flash_cute::sm90::backward::dq_in_registers_large {

using namespace cute;
using backward::KernelArgs;

enum Side : int { kSideS, kSideDp, kSides };

template <class Element_, int kHeadDim, Variant kVariant_>
struct SideTraits {
  using Element = Element_;
  static constexpr Variant kVariant = kVariant_;
  static_assert(kVariant.reads_sequences, "dense batches run in the packed kernel");
  static constexpr int kCtas = ctas_per_tile(kHeadDim);  // CTA r is of side r % kSides
  static constexpr int kCtasPerSide = kCtas / kSides;
  static constexpr int kColumns = columns_per_cta(kHeadDim);
  static_assert(kCtasPerSide * kColumns >= kHeadDim);
  static constexpr int kSmemBytes = smem_bytes(kHeadDim);
  static constexpr int kThreads = kernel_shape(kHeadDim).threads;
  static constexpr int kProducerRegs = 32;
  static constexpr int kScoresRegs = 64;
  static constexpr int kProductsRegs = 208;  // 32 + 64 + 2 * 208 = 4 * 128, the registers per thread at launch

  // Tiles are loaded in units of kUnitColumns columns: two TMA boxes of 64 rows x 64 columns.
  static constexpr int kChunk = 64;
  static constexpr int kUnitColumns = 128;
  static constexpr int kUnits = kColumns / kUnitColumns;
  static constexpr int kUnitElements = kTileRows * kUnitColumns;
  static constexpr int kStages = kStagesOfSide;  // tiles in the ring
  static constexpr int kWarpgroups = 2;  // that multiply
  // A buffer of W is free when the streamed tile that it was multiplied with is: both serve every second step.
  static_assert(kStages == 2 && kFragments == 2, "a step's buffers follow from its parity");
  static constexpr int kUnitsOfSums = kUnits / kWarpgroups;  // of a warpgroup

  // The units of a step's tile in the order of its scores and loads. The warpgroup that computes the scores has added
  // the step before last to its own sums by then, and so freed its own units' buffers; those of the other one's units
  // are free a product later.
  CUTE_HOST_DEVICE static constexpr int unit_in_order(int step, int i) {
    return (step % kWarpgroups * kUnitsOfSums + i) % kUnits;
  }

  // Scores are read K-major, from shared memory. Sums have P^T or dS in registers and read the streamed tile MN-major.
  using MmaScores = decltype(make_tiled_mma(wgmma_ss_atom<Element, kTileRows>()));
  using MmaSums = decltype(make_tiled_mma(
      SM90::GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kUnitColumns>, _64>, SM90::GMMA::Major::K,
                                 SM90::GMMA::Major::MN>()));
  using SmemLayout =
      decltype(tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<Element>{}, Shape<_64, Int<kUnitColumns>>{}));
  using SmemLayoutT = decltype(tile_to_shape(SM90::GMMA::Layout_MN_SW128_Atom<Element>{},
                                             Shape<Int<kUnitColumns>, _64>{}, Step<_2, _1>{}));

  // A CTA makes P and dS of a piece of the scores: all rows of the fragments, these columns.
  static constexpr int kPieceColumns = kTileRows / kCtas;
  using MmaPiece = decltype(make_tiled_mma(wgmma_ss_atom<Element, kPieceColumns>()));
  // A thread's registers of these columns, in a fragment of the scores, are its whole fragment of a piece.
  static_assert([] {
    SM90::GMMA::CLayout_64xN<kTileRows> const scores;     // (thread, value) -> row + 64 * column
    SM90::GMMA::CLayout_64xN<kPieceColumns> const piece;  // the same
    constexpr int kValues = 64 * kPieceColumns / 128;
    for (int thread = 0; thread < 128; ++thread) {
      if (scores(thread, _0{}) != piece(thread, _0{})) return false;
    }
    for (int i = 0; i < kCtas * kValues; ++i) {
      if (scores(_0{}, i) != piece(_0{}, i % kValues) + 64 * kPieceColumns * (i / kValues)) return false;
    }
    return true;
  }());

  template <class Tile>
  struct alignas(1024) Storage {
    Element resident[kUnits][kUnitElements];  // the gradient in the epilogue
    Element stream[kStages * kUnits][kUnitElements];
    PartBuffer<kCtas> parts;
    FragmentBuffer fragments[kFragments];  // P^T or dS^T, or dS, of a step, by its parity
    Tile tile;
    Pipeline<1> resident_pipeline;
    Pipeline<kStages * kUnits> stream_pipeline;
    uint64_t parts_full;
    uint64_t fragment_full[kFragments];

    CUTE_DEVICE void init() {
      resident_pipeline.init(1);
      stream_pipeline.init(4);
      initialize_barrier(parts_full, 1);
      set_barrier_transaction_bytes(parts_full, kPartBytes);
      for (auto& full : fragment_full) {
        initialize_barrier(full, 1);
        set_barrier_transaction_bytes(full, kFragmentBytes);
      }
    }
  };
  using KeysStorage = Storage<KeyTile>;
  using QueriesStorage = Storage<RowTileTask>;
  static_assert(cute::max(sizeof(KeysStorage), sizeof(QueriesStorage)) <= kSmemBytes);
};

// Of this CTA.
CUTE_DEVICE int rank_in_cluster() { return static_cast<int>(block_rank_in_cluster()); }
CUTE_DEVICE int side() { return rank_in_cluster() % kSides; }
template <class Traits>
CUTE_DEVICE int first_column_of_side() {
  return rank_in_cluster() / kSides * Traits::kColumns;
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
