// Types of the sm90 backward for head dims above 128: tile, MMAs, and the shared memory of its two kernels.
#pragma once

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "contract/variant.h"
#include "sm90/backward/common/key_tile.cuh"
#include "sm90/common/pipeline.cuh"
#include "sm90/common/wgmma_atoms.cuh"
#include "tile.h"

namespace flash_cute::sm90::backward::dq_in_registers {

using namespace cute;
using backward::KernelArgs;
using backward::KeyTile;
using backward::MaskedRows;
using backward::RowTile;

// A tile of query rows where sequences are read at run time.
struct SequenceQueryTile {
  int m_block;  // of kQueryTileRows rows; -1: the CTA has none
  int head;
  int batch;    // the sequence's index
  int first_row_tile;  // of its sequence, among those of a head
  Sequence sequence;
};

// A key tile, and a tile of query rows, where the batch has a mask.
struct MaskedKeyTile : KeyTile, MaskedRows {};
struct MaskedQueryTile {
  int m_block;  // of kQueryTileRows rows
  int head;
  int batch;
  int steps;                  // key tiles that some row sees
  int last;                   // the last one
  uint32_t const* visited;    // those that the first 64 rows see, a bit each
  uint32_t const* whole;      // of which all of these rows see all keys
  int to_second;              // words to the same of the last 64 rows; 0: there are none
  RowBits const* columns;      // the first intervals of all columns, or the bits of the first 64 rows
  int64_t to_second_columns;   // in elements: to the second intervals, or where columns have one 0; to the bits of the
                               // last 64 rows, or where there are no such rows 0
};

// A step's key tile, as the producer, which alone follows the mask's lists, tells the consumers.
struct KeyVisit {
  int n_block;
  bool masked[2];  // whether a warpgroup's rows do not see all of the keys
};

template <class Element_, int kHeadDim_, int kHeadDimV_ = kHeadDim_, Variant kVariant_ = Variant::kDense>
struct Traits {
  using Element = Element_;
  static constexpr Variant kVariant = kVariant_;
  static constexpr int kHeadDim = kHeadDim_;    // of Q, K, dQ, dK
  static constexpr int kHeadDimV = kHeadDimV_;  // of V, O, dV
  static constexpr int kBlockM = kRows;
  static constexpr int kBlockN = kKeys;
  static constexpr int kStages = dq_in_registers::kStages;
  static constexpr int kWarpgroups = 2;
  static constexpr int kConsumerThreads = 128 * kWarpgroups;
  static constexpr int kThreads = 128 + kConsumerThreads;
  static constexpr int kProducerRegs = 24;
  static constexpr int kConsumerRegs = 240;  // 24 + 2 * 240 = 3 * 168, the registers per thread at launch
  static_assert(kBlockM == 64 && kBlockN == 64 && kStages == 2);
  static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 && kHeadDimV <= kHeadDim);

  // Each GEMM is by one warpgroup: 64 x 64 scores, transposed or not, from shared memory, and sums of 64 rows with P^T
  // or dS in registers.
  using MmaScores = decltype(make_tiled_mma(wgmma_ss_atom<Element, 64>()));
  template <int kColumns>
  using MmaSums = decltype(make_tiled_mma(
      SM90::GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kColumns>, _64>, SM90::GMMA::Major::K,
                                 SM90::GMMA::Major::MN>()));

  // A tile is 64 rows of Q, K, V or dO, stored in chunks of kChunk columns, and read through two layouts: K-major where
  // a GEMM sums over the head dim, MN-major where it sums over the tile's rows.
  static constexpr int kChunk = 64;
  template <int kColumns>
  struct Columns {
    using Element = Element_;
    static constexpr int kChunk = 64;
    static constexpr int kChunks = kColumns / kChunk;
  };
  using ColumnsQ = Columns<kHeadDim>;
  using ColumnsK = Columns<kHeadDim>;
  using ColumnsV = Columns<kHeadDimV>;
  template <int kColumns>
  using SmemLayout = decltype(tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<Element>{}, Shape<_64, Int<kColumns>>{}));
  template <int kColumns>
  using SmemLayoutT = decltype(tile_to_shape(SM90::GMMA::Layout_MN_SW128_Atom<Element>{}, Shape<Int<kColumns>, _64>{},
                                             Step<_2, _1>{}));
  static constexpr int kTileElements = 64 * kHeadDim;    // of Q or K
  static constexpr int kTileElementsV = 64 * kHeadDimV;  // of V or dO

  static constexpr bool kDeltaWithQ = false;
  static constexpr bool kProducerMasks = false;
  static constexpr int kListedRows = kQueryTileRows;  // of the row tiles in SequenceTiles
  using Tile = std::conditional_t<kVariant.reads_sequences, backward::SequenceKeyTile,
                                  std::conditional_t<kVariant.reads_mask, MaskedKeyTile, KeyTile>>;
  using SmemQueryTile = std::conditional_t<kVariant.reads_mask, MaskedQueryTile, SequenceQueryTile>;
  struct None {};

  // dK and dV.
  struct alignas(1024) KeysStorage {
    Element k[kTileElements];  // dV in the epilogue
    Element v[kTileElements];  // V, smaller where kHeadDimV is; dK in the epilogue
    Element q[kStages][kTileElements];
    Element dout[kStages][kTileElementsV];
    // P^T in float32 and in fragment order: read by the threads of the same index in the warpgroup. Of modified scores
    // times their derivative.
    uint4 p[kStages][64 * 64 / 4];
    alignas(128) float lse_log2[kStages][kBlockM];
    alignas(128) float delta[kStages][kBlockM];
    Tile tile;
    Pipeline<1> k_pipeline;
    Pipeline<1> v_pipeline;
    Pipeline<kStages> q_pipeline;     // Q and lse_log2
    Pipeline<kStages> dout_pipeline;  // dO and delta
    Pipeline<kStages> p_pipeline;     // P^T, from the dV warpgroup to the dK warpgroup
    std::conditional_t<kVariant.reads_mask, backward::RowVisits, None> visits;
  };

  // dQ. A CTA has 64 rows per warpgroup.
  struct alignas(1024) QueriesStorage {
    Element q[kWarpgroups][kTileElements];  // dQ in the epilogue
    Element dout[kWarpgroups][kTileElementsV];
    Element k[kStages][kTileElements];
    Element v[kTileElementsV];
    Pipeline<1> rows_pipeline[kWarpgroups];  // Q and dO
    Pipeline<kStages> k_pipeline;
    Pipeline<1> v_pipeline;
    SmemQueryTile tile;  // written only where sequences are read at run time, or a mask
    std::conditional_t<kVariant.reads_mask, KeyVisit[kStages], None> visits;
  };
  static_assert(cute::max(sizeof(QueriesStorage), sizeof(KeysStorage)) == smem_bytes(kHeadDim, kHeadDimV));
};

}  // namespace flash_cute::sm90::backward::dq_in_registers
