// Types of the sm90 backward for head dims 257 to 320: MMAs, and the shared memory of its two kernels.
#pragma once

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "contract/variant.h"
#include "sm90/backward/common/args.cuh"
#include "sm90/common/pipeline.cuh"
#include "sm90/common/warpgroup.cuh"
#include "sm90/common/wgmma_atoms.cuh"
#include "handover.cuh"
#include "task.cuh"
#include "tile.h"

namespace flash_cute::sm90::backward::dq_in_registers_large {

using namespace cute;
using backward::KernelArgs;

template <class Element_, int kHeadDim, Variant kVariant_>
struct Traits {
  using Element = Element_;
  static constexpr Variant kVariant = kVariant_;
  static_assert(kVariant.reads_sequences, "dense batches run in the packed kernel");
  static constexpr int kCtas = ctas_per_tile(kHeadDim);
  static constexpr int kColumns = columns_per_cta(kHeadDim);
  static_assert(kCtas == 1 && kColumns >= kHeadDim && kColumns % 64 == 0);
  static constexpr int kSmemBytes = smem_bytes(kHeadDim);
  static constexpr int kThreads = kernel_shape(kHeadDim).threads;
  static constexpr int kProducerRegs = 24;
  static constexpr int kConsumerRegs = 240;  // 24 + 2 * 240 = 3 * 168, the registers per thread at launch

  // Each product is by one warpgroup: 64 x 64 scores, transposed or not, from shared memory, and sums
  // of 64 rows with P^T or dS in registers.
  using MmaScores = decltype(make_tiled_mma(wgmma_ss_atom<Element, kTileRows>()));
  using MmaSums = decltype(make_tiled_mma(
      SM90::GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kColumns>, _64>, SM90::GMMA::Major::K,
                                 SM90::GMMA::Major::MN>()));

  // A tile is 64 rows of Q, K, V or dO, one TMA box of 64 columns after the other. It is read through two layouts:
  // K-major where a product sums over the columns, MN-major where it sums over the tile's rows.
  static constexpr int kChunk = 64;
  static constexpr int kChunks = kColumns / kChunk;
  // dO and V have one buffer, and are loaded in two units of chunks, of which the first is replaced while products use
  // the second one.
  static constexpr int kUnits = 2;
  static constexpr int first_chunk(int unit) { return unit * ((kChunks + 1) / kUnits); }
  static constexpr int chunks_of_unit(int unit) {
    return unit + 1 < kUnits ? first_chunk(unit + 1) - first_chunk(unit) : kChunks - first_chunk(unit);
  }
  static constexpr int kTileElements = kTileRows * kColumns;
  using SmemLayout =
      decltype(tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<Element>{}, Shape<_64, Int<kColumns>>{}));
  using SmemLayoutT = decltype(tile_to_shape(SM90::GMMA::Layout_MN_SW128_Atom<Element>{}, Shape<Int<kColumns>, _64>{},
                                             Step<_2, _1>{}));

  // dK and dV.
  struct alignas(1024) KeysStorage {
    Element k[kTileElements];  // dV in the epilogue
    Element v[kTileElements];  // dK in the epilogue
    Element q[kStagesOfQ][kTileElements];
    Element dout[kTileElements];
    FragmentBuffer p[kFragments];  // P^T; of modified scores times their derivative
    alignas(128) float lse_log2[kStagesOfQ][kTileRows];
    alignas(128) float delta[kTileRows];
    KeyTile tile;
    Pipeline<1> k_pipeline;
    Pipeline<1> v_pipeline;
    Pipeline<kStagesOfQ> q_pipeline;  // Q and lse_log2
    Pipeline<kUnits> dout_pipeline;   // units of dO, the first one with delta
    Pipeline<kFragments> p_pipeline;
  };
  static_assert(sizeof(KeysStorage) <= kSmemBytes);

  // dQ.
  struct alignas(1024) QueriesStorage {
    Element q[kTileElements];  // dQ in the epilogue
    Element dout[kTileElements];
    Element k[kStagesOfKeys][kTileElements];
    Element v[kTileElements];
    FragmentBuffer ds[kFragments];
    RowTileTask tile;
    Pipeline<1> rows_pipeline;  // Q and dO
    Pipeline<kStagesOfKeys> k_pipeline;
    Pipeline<kUnits> v_pipeline;  // units of V
    Pipeline<kFragments> ds_pipeline;
  };
  static_assert(sizeof(QueriesStorage) <= kSmemBytes);
};

// Fragments of a CTA's tiles and scores. KeysRole of dq_in_registers makes the same ones of layouts that follow from
// the role's head dims, and holds what the role reads besides.
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

// Issues a unit's share of a product as one WGMMA group: of scores, which are summed over the columns,
template <class Traits, Accumulate kAccumulate, int kUnit, class Mma, class FragA, class FragB, class Accumulator>
CUTE_DEVICE void issue_scores_of_unit(Mma& mma,
                                      FragA const& tCrA,   // (MMA, MMA_M, MMA_K): descriptors
                                      FragB const& tCrB,   // (MMA, MMA_N, MMA_K): descriptors
                                      Accumulator& acc) {  // (MMA, MMA_M, MMA_N)
  constexpr int kSteps = Traits::kChunk / 16, kFirst = kSteps * Traits::first_chunk(kUnit);
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  mma.accumulate_ =
      kAccumulate == Accumulate::kOverwrite ? SM90::GMMA::ScaleOut::Zero : SM90::GMMA::ScaleOut::One;
  CUTE_UNROLL
  for (int k = kFirst; k < kFirst + kSteps * Traits::chunks_of_unit(kUnit); ++k) {
    cute::gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
    mma.accumulate_ = SM90::GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(acc);
}
// and of sums, which have the columns, a chunk per MMA.
template <class Traits, int kUnit, class Mma, class FragA, class FragB, class Accumulator>
CUTE_DEVICE void issue_sums_of_unit(Mma& mma,
                                    FragA& tCrA,         // (MMA, 1, MMA_K): registers
                                    FragB const& tCrB,   // (MMA, MMA_N, MMA_K): descriptors
                                    Accumulator& acc) {  // (MMA, 1, MMA_N)
  CUTE_STATIC_ASSERT_V(size<2>(acc) == Int<Traits::kChunks>{});
  warpgroup_fence_operand(tCrA);
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  mma.accumulate_ = SM90::GMMA::ScaleOut::One;
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrA); ++k) {
    CUTE_UNROLL
    for (int chunk = Traits::first_chunk(kUnit); chunk < Traits::first_chunk(kUnit) + Traits::chunks_of_unit(kUnit);
         ++chunk) {
      auto acc_chunk = acc(_, _0{}, chunk);
      cute::gemm(mma, acc_chunk, tCrA(_, _0{}, k), tCrB(_, chunk, k), acc_chunk);
    }
  }
  warpgroup_commit_batch();
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
