// Types of the sm90 backward for large head dims: MMAs, and the shared memory of its two kernels.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "../../core/variant.h"
#include "../bwd/args.cuh"
#include "../pipeline.cuh"
#include "../wgmma_atoms.cuh"
#include "exchange.cuh"
#include "task.cuh"
#include "tile.h"

namespace flash_cute::sm90::bwd_large {

using namespace cute;
using bwd::KernelArgs;

template <class Element_, int kHeadDim, Variant kVariant_>
struct Traits {
  using Element = Element_;
  static constexpr Variant kVariant = kVariant_;
  static_assert(reads_sequences(kVariant), "dense batches run in the packed kernel");
  static constexpr int kCtas = ctas_per_tile(kHeadDim);
  static constexpr int kColumns = columns_per_cta(kHeadDim);
  static_assert(kCtas * kColumns >= kHeadDim && kColumns % 64 == 0);
  static constexpr int kStagesOfRows = stages_of_rows(kColumns);
  static constexpr int kStagesOfKeys = bwd_large::kStagesOfKeys;
  static constexpr int kStagesOfValues = stages_of_values(kColumns);
  static constexpr int kSmemBytes = smem_bytes(kHeadDim);
  static constexpr int kThreads = kernel_shape(kHeadDim).threads;
  static constexpr int kProducerRegs = 40;  // with 24 the addresses of the loads spill
  static constexpr int kConsumerRegs = 232;  // 40 + 2 * 232 = 3 * 168, the registers per thread at launch

  // Each product is by one warpgroup: the CTA's part of 64 x 64 scores, transposed or not, from shared memory, and sums
  // of 64 rows with P^T or dS in registers.
  using MmaScores = decltype(make_tiled_mma(wgmma_ss_atom<Element, kTileRows>()));
  using MmaSums = decltype(make_tiled_mma(
      SM90::GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kColumns>, _64>, SM90::GMMA::Major::K,
                                 SM90::GMMA::Major::MN>()));

  // A tile is 64 rows of Q, K, V or dO, one TMA box of 64 columns after the other. It is read through two layouts:
  // K-major where a product sums over the columns, MN-major where it sums over the tile's rows.
  static constexpr int kChunk = 64;
  static constexpr int kChunks = kColumns / kChunk;
  static constexpr int kTileElements = kTileRows * kColumns;
  using SmemLayout =
      decltype(tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<Element>{}, Shape<_64, Int<kColumns>>{}));
  using SmemLayoutT = decltype(tile_to_shape(SM90::GMMA::Layout_MN_SW128_Atom<Element>{}, Shape<Int<kColumns>, _64>{},
                                             Step<_2, _1>{}));

  // dK and dV.
  struct alignas(1024) KeysStorage {
    Element k[kTileElements];  // dV in the epilogue
    Element v[kTileElements];  // dK in the epilogue
    Element q[kStagesOfRows][kTileElements];
    Element dout[kStagesOfRows][kTileElements];
    PartBuffer parts_of_s;  // P^T, once the part has been read; of modified scores times their derivative
    PartBuffer parts_of_dp;
    alignas(128) float lse_log2[kStagesOfRows][kTileRows];
    alignas(128) float delta[kStagesOfRows][kTileRows];
    KeyTile tile;
    ExchangeBarriers<kCtas> exchange_of_s;
    ExchangeBarriers<kCtas> exchange_of_dp;
    Pipeline<1> k_pipeline;
    Pipeline<1> v_pipeline;
    Pipeline<kStagesOfRows> q_pipeline;     // Q and lse_log2
    Pipeline<kStagesOfRows> dout_pipeline;  // dO and delta
    Pipeline<1> p_pipeline;                 // full: P^T is in parts_of_s
  };
  static_assert(sizeof(KeysStorage) <= kSmemBytes);

  // dQ.
  struct alignas(1024) QueriesStorage {
    Element q[kTileElements];  // dQ in the epilogue
    Element dout[kTileElements];
    Element k[kStagesOfKeys][kTileElements];
    Element v[kStagesOfValues][kTileElements];
    PartBuffer parts_of_s;
    PartBuffer parts_of_dp;  // dS, once the part has been read
    RowTileTask tile;
    ExchangeBarriers<kCtas> exchange_of_s;
    ExchangeBarriers<kCtas> exchange_of_dp;
    Pipeline<1> rows_pipeline;  // Q and dO
    Pipeline<kStagesOfKeys> k_pipeline;
    Pipeline<kStagesOfValues> v_pipeline;
    Pipeline<1> ds_pipeline;    // full: dS is in parts_of_dp
    Pipeline<2> turn_pipeline;  // full: the tensor cores have computed dP, and may add to dQ
  };
  static_assert(sizeof(QueriesStorage) <= kSmemBytes);
};

// Fragments of a CTA's tiles and scores.
template <class Traits>
struct Products {
  using Element = typename Traits::Element;
  typename Traits::MmaScores mma_scores;
  typename Traits::MmaSums mma_sums;

  CUTE_DEVICE auto a_operand(Element* buffer) const {
    auto sX = make_tensor(make_smem_ptr(buffer), typename Traits::SmemLayout{});  // (64, columns)
    return mma_scores.get_slice(0).partition_fragment_A(sX);                      // (MMA, MMA_M, MMA_K)
  }
  CUTE_DEVICE auto b_operand(Element* buffer) const {
    auto sX = make_tensor(make_smem_ptr(buffer), typename Traits::SmemLayout{});  // (64, columns)
    return mma_scores.get_slice(0).partition_fragment_B(sX);                      // (MMA, MMA_N, MMA_K)
  }
  CUTE_DEVICE auto b_operand_of_sums(Element* buffer) const {
    auto sXt = make_tensor(make_smem_ptr(buffer), typename Traits::SmemLayoutT{});  // (columns, 64)
    return mma_sums.get_slice(0).partition_fragment_B(sXt);                         // (MMA, MMA_N, MMA_K)
  }
  CUTE_DEVICE auto scores() const { return partition_fragment_C(mma_scores, Shape<_64, _64>{}); }
  CUTE_DEVICE auto sums() const { return partition_fragment_C(mma_sums, Shape<_64, Int<Traits::kColumns>>{}); }
};

// The first of the CTA's columns.
template <class Traits>
CUTE_DEVICE int first_column_of_cta() {
  return static_cast<int>(block_rank_in_cluster()) * Traits::kColumns;
}

}  // namespace flash_cute::sm90::bwd_large
