// Types of the sm90 backward for different head dims of q and v: 192 and 128, those of multi-head latent attention
// (MLA). As Traits, but dQ is computed in halves of its columns, one per warpgroup; see mla_mainloop.cuh.
#pragma once

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "sm90/backward/common/load.cuh"
#include "task.cuh"
#include "tile.h"
#include "sm90/common/pipeline.cuh"
#include "sm90/common/wgmma_atoms.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

using namespace cute;

template <class Element_, int kHeadDim_, TileConfig kTile_, Variant kVariant_, int kHeadDimV_>
struct MlaTraits {
  using Element = Element_;
  static constexpr TileConfig kTile = kTile_;
  static constexpr Variant kVariant = kVariant_;
  static constexpr int kHeadDim = kHeadDim_;    // of Q, K, dQ, dK
  static constexpr int kHeadDimV = kHeadDimV_;  // of V, O, dV
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kKeys = 64;  // keys per consumer warpgroup: the M of one WGMMA
  static constexpr int kWarpgroups = kBlockN / kKeys;
  static constexpr int kConsumerThreads = 128 * kWarpgroups;
  static constexpr int kThreads = 128 + kConsumerThreads;
  // Together 3 * 168, the registers per thread at launch.
  static constexpr int kProducerRegs = 24;
  static constexpr int kConsumerRegs = 240;
  static_assert(kWarpgroups == 2 && kBlockM == 64 && kStages == 2);
  static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 && kHeadDimV <= kHeadDim && !kVariant.modifies_scores);

  // Everything but dQ is computed transposed, each warpgroup for its 64 keys: S^T = K Q^T and dP^T = V dO^T from shared
  // memory; dV += P^T dO and dK += dS^T Q with P^T and dS^T in registers.
  using ByKeys = Layout<Shape<Int<kWarpgroups>, _1, _1>>;
  using MmaScores = decltype(make_tiled_mma(wgmma_ss_atom<Element, kBlockM>(), ByKeys{}));
  template <int kColumns, class Warpgroups = ByKeys>
  using MmaSums = decltype(make_tiled_mma(
      SM90::GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kColumns>, Int<kBlockM>>,
                                 SM90::GMMA::Major::K, SM90::GMMA::Major::MN>(),
      Warpgroups{}));
  using MmaDk = MmaSums<kHeadDim>;
  using MmaDv = MmaSums<kHeadDimV>;
  // dQ = dS K over all keys of the CTA: all rows of a step, and half of the columns per warpgroup.
  static constexpr bool kAlternates = false;
  static constexpr bool kByColumns = true;
  static constexpr int kDqColumns = kHeadDim / kWarpgroups;
  template <int kColumns>
  using MmaQueries = decltype(make_tiled_mma(wgmma_ss_atom_mn<Element, kColumns>()));
  // Warpgroup 0 computes dQ of a step in the next one, and keeps dS^T of that one meanwhile: there are registers for so
  // many columns at once.
  static constexpr int kDqColumnsAtOnce = 64;

  // A tile is stored in chunks of kChunk columns, and K, of which dQ reads halves of 96 columns, in chunks of 32. Each
  // is read through two layouts: K-major where a GEMM sums over the head dim, MN-major where it sums over the tile's
  // rows.
  template <int kColumns, int kChunk_>
  struct Columns {
    using Element = Element_;
    static constexpr int kChunk = kChunk_;
    static constexpr int kChunks = kColumns / kChunk;
  };
  static constexpr int kChunk = 64;
  static constexpr int kChunkOfK = kDqColumns % 64 == 0 ? 64 : 32;
  static_assert(kDqColumns % kChunkOfK == 0);
  using ColumnsQ = Columns<kHeadDim, kChunk>;
  using ColumnsK = Columns<kHeadDim, kChunkOfK>;
  using ColumnsV = Columns<kHeadDimV, kChunk>;  // of V and dO
  template <int kChunk_>
  using AtomK = std::conditional_t<kChunk_ == 64, SM90::GMMA::Layout_K_SW128_Atom<Element>,
                                   SM90::GMMA::Layout_K_SW64_Atom<Element>>;
  template <int kChunk_>
  using AtomMN = std::conditional_t<kChunk_ == 64, SM90::GMMA::Layout_MN_SW128_Atom<Element>,
                                    SM90::GMMA::Layout_MN_SW64_Atom<Element>>;
  template <int kColumns>
  using SmemLayoutRows =
      decltype(tile_to_shape(AtomK<kChunk>{}, Shape<Int<kBlockM>, Int<kColumns>, Int<kStages>>{}));
  template <int kColumns>
  using SmemLayoutRowsT = decltype(tile_to_shape(AtomMN<kChunk>{}, Shape<Int<kColumns>, Int<kBlockM>, Int<kStages>>{},
                                                 Step<_2, _1, _3>{}));
  using SmemLayoutQ = SmemLayoutRows<kHeadDim>;
  using SmemLayoutQt = SmemLayoutRowsT<kHeadDim>;
  using SmemLayoutDo = SmemLayoutRows<kHeadDimV>;
  using SmemLayoutDoT = SmemLayoutRowsT<kHeadDimV>;
  using SmemLayoutK = decltype(tile_to_shape(AtomK<kChunkOfK>{}, Shape<Int<kBlockN>, Int<kHeadDim>>{}));
  using SmemLayoutV = decltype(tile_to_shape(AtomK<kChunk>{}, Shape<Int<kBlockN>, Int<kHeadDimV>>{}));
  // Some columns of K.
  template <int kColumns>
  using SmemLayoutKt =
      decltype(tile_to_shape(AtomMN<kChunkOfK>{}, Shape<Int<kColumns>, Int<kBlockN>>{}, Step<_2, _1>{}));
  // dS, contiguous along the rows: as the A operand of dQ (BLK_M, BLK_N), and transposed, as the warpgroups write it.
  static constexpr int kScoreStages = 1;
  using SmemLayoutS = decltype(tile_to_shape(SM90::GMMA::Layout_MN_SW128_Atom<Element>{},
                                             Shape<Int<kBlockM>, Int<kBlockN>>{}));
  using SmemLayoutSt = decltype(tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<Element>{},
                                              Shape<Int<kBlockN>, Int<kBlockM>, _1>{}, Step<_2, _1, _3>{}));
  static constexpr bool kDeltaWithQ = false;
  // P is kept in float16 until dP is there, times 2^12 so that small ones do not underflow. All results are, too.
  static constexpr float kSumsExponent = 12.f, kSumsFactor = 1.f / 4096;
  static_assert(!std::is_same_v<Element, cutlass::half_t>);  // dS would be of P as rounded for dV
  static constexpr bool kProducerMasks = true;  // it says which steps need which mask
  // A warpgroup's 64 rows of dK or dV, stored by TMA.
  template <int kColumns>
  using MmaOut = MmaSums<kColumns, Layout<Shape<_1, _1, _1>>>;
  template <int kColumns>
  using SmemLayoutOut = decltype(tile_to_shape(AtomK<kChunk>{}, Shape<Int<kKeys>, Int<kColumns>>{}));

  static constexpr int kQElements = kBlockM * kHeadDim;
  static constexpr int kDoElements = kBlockM * kHeadDimV;
  static constexpr int kKElements = kBlockN * kHeadDim;
  static constexpr int kVElements = kBlockN * kHeadDimV;
  static constexpr int kDqElements = kQElements / kWarpgroups;  // per warpgroup and step
  static constexpr int kDqBuffers = 1;
  static constexpr int kDqBarriers = 2;  // the adding threads have every other step: each waits at barriers of its own
  static constexpr int kDqRowTiles = 1;  // converted together, see DqRows
  static constexpr int kPartRowTiles = part_row_tiles(kBlockM, kBlockN);

  static constexpr int kListedRows = kBlockM;  // of the row tiles in SequenceTiles
  using Task = std::conditional_t<kVariant.reads_sequences, SequenceTask, dq_in_memory::Task>;

  struct alignas(1024) SharedStorage {
    Element k[kKElements];
    Element v[kVElements];
    Element q[kStages][kQElements];
    Element dout[kStages][kDoElements];
    Element ds[kScoreStages][kBlockM * kBlockN];
    float dq[kWarpgroups][kDqBuffers][kDqElements];  // the warpgroup's dV, then dK in the epilogue
    alignas(128) float lse_log2[kStages][kBlockM];
    alignas(128) float delta[kStages][kBlockM];
    StepMask masks[kStages];
    Task task[2];
    Pipeline<2> task_pipeline;
    Pipeline<1> k_pipeline;
    Pipeline<1> v_pipeline;
    Pipeline<kStages> q_pipeline;     // Q, lse_log2 and the mask
    Pipeline<kStages> dout_pipeline;  // dO and delta
    Pipeline<kScoreStages> ds_pipeline;  // all consumer warps fill it and release it
    Pipeline<kDqBarriers> dq_pipeline[kWarpgroups];
    Pipeline<2> sums_pipeline;  // the watcher: other CTAs' sums and parts for the task are complete
    Pipeline<2> draw_pipeline;  // where sequences are read at run time, the producer: the next task may be drawn
  };
  static_assert(sizeof(SharedStorage) == smem_bytes(kTile, kHeadDim, kHeadDimV));
};

}  // namespace flash_cute::sm90::backward::dq_in_memory
