// Types of one sm90 backward kernel: tile, MMAs, shared memory.
#pragma once

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "task.cuh"
#include "sm90/backward/common/masked_rows.cuh"
#include "tile.h"
#include "sm90/common/pipeline.cuh"
#include "sm90/common/wgmma_atoms.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

using namespace cute;

template <class Element_, int kHeadDim_, TileConfig kTile_, Variant kVariant_ = Variant::kDense>
struct Traits {
  using Element = Element_;
  static constexpr TileConfig kTile = kTile_;
  static constexpr Variant kVariant = kVariant_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDim_;
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
  static_assert(kWarpgroups == 2 && kHeadDim % 32 == 0 && (kBlockM == 64 || kBlockM == 128));

  // Everything but dQ is computed transposed, each warpgroup for its 64 keys: S^T = K Q^T and dP^T = V dO^T from shared
  // memory, or with the first columns of V in registers; dV += P^T dO and dK += dS^T Q with P^T and dS^T in registers.
  using ByKeys = Layout<Shape<Int<kWarpgroups>, _1, _1>>;
  using MmaScores = decltype(make_tiled_mma(wgmma_ss_atom<Element, kBlockM>(), ByKeys{}));
  using MmaScoresRs = decltype(make_tiled_mma(
      SM90::GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kBlockM>, Int<kHeadDim>>,
                                 SM90::GMMA::Major::K, SM90::GMMA::Major::K>(),
      ByKeys{}));
  using MmaKeys = decltype(make_tiled_mma(
      SM90::GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kHeadDim>, Int<kBlockM>>,
                                 SM90::GMMA::Major::K, SM90::GMMA::Major::MN>(),
      ByKeys{}));
  using MmaDk = MmaKeys;
  using MmaDv = MmaKeys;
  // dQ = dS K over all keys of the CTA. With 64 rows per step the warpgroups take turns, one step each, so that dS and
  // K are read once; with 128 rows each warpgroup has half of the rows.
  static constexpr bool kAlternates = kBlockM == 64;
  static constexpr bool kByColumns = false;  // each warpgroup has half of the columns: see MlaTraits
  using MmaQueries = decltype(make_tiled_mma(wgmma_ss_atom_mn<Element, kHeadDim>(),
                                             std::conditional_t<kAlternates, Layout<Shape<_1, _1, _1>>, ByKeys>{}));

  // A tile is stored in chunks of kChunk columns, as in the forward. Each is read through two layouts: K-major where a
  // GEMM sums over the head dim, MN-major where it sums over the tile's rows.
  static constexpr int kChunk = kHeadDim % 64 == 0 ? 64 : 32;
  static constexpr int kChunks = kHeadDim / kChunk;
  template <class SW128, class SW64>
  using Atom = std::conditional_t<kChunk == 64, SW128, SW64>;
  using AtomK = Atom<SM90::GMMA::Layout_K_SW128_Atom<Element>, SM90::GMMA::Layout_K_SW64_Atom<Element>>;
  using AtomMN = Atom<SM90::GMMA::Layout_MN_SW128_Atom<Element>, SM90::GMMA::Layout_MN_SW64_Atom<Element>>;
  using SmemLayoutQ = decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockM>, Int<kHeadDim>, Int<kStages>>{}));  // and dO
  using SmemLayoutQt = decltype(tile_to_shape(AtomMN{}, Shape<Int<kHeadDim>, Int<kBlockM>, Int<kStages>>{},
                                              Step<_2, _1, _3>{}));
  using SmemLayoutK = decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockN>, Int<kHeadDim>>{}));  // and V
  using SmemLayoutKt = decltype(tile_to_shape(AtomMN{}, Shape<Int<kHeadDim>, Int<kBlockN>>{}, Step<_2, _1>{}));
  // dS, contiguous along the rows: as the A operand of dQ (BLK_M, BLK_N), and transposed, as the warpgroups write it.
  static constexpr int kScoreStages = 2;
  using SmemLayoutS = decltype(tile_to_shape(SM90::GMMA::Layout_MN_SW128_Atom<Element>{},
                                             Shape<Int<kBlockM>, Int<kBlockN>, Int<kScoreStages>>{}));
  using SmemLayoutSt = decltype(tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<Element>{},
                                              Shape<Int<kBlockN>, Int<kBlockM>, Int<kScoreStages>>{},
                                              Step<_2, _1, _3>{}));
  // Where dP^T is issued after P^T, it is added to -delta, which by then must have come with Q.
  static constexpr bool kDeltaWithQ = kTile.late_dp;
  static constexpr bool kProducerMasks = false;
  static constexpr float kSumsFactor = 1.f;  // times the sums of dQ / scale, dK / scale and dV are their values
  // dS is computed in two shares where a step has 64 rows: dK of the first runs while the second is computed.
  static constexpr int kDsShares = kBlockM == 64 ? 2 : 1;
  // The address of a thread's stores of dS is kept in a register, or computed in each step where there is none.
  static constexpr bool kKeepsDsAddress = kHeadDim != 64;
  // A warpgroup's 64 rows of dK or dV, stored by TMA.
  using MmaOut = decltype(make_tiled_mma(
      SM90::GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kHeadDim>, Int<kBlockM>>,
                                 SM90::GMMA::Major::K, SM90::GMMA::Major::MN>()));
  using SmemLayoutOut = decltype(tile_to_shape(AtomK{}, Shape<Int<kKeys>, Int<kHeadDim>>{}));

  using ColumnsQ = Traits;  // chunks as one TMA box writes them
  using ColumnsK = Traits;
  using ColumnsV = Traits;  // of V and dO

  static constexpr int kQElements = kBlockM * kHeadDim;
  static constexpr int kDoElements = kQElements;
  static constexpr int kKElements = kBlockN * kHeadDim;
  static constexpr int kVElements = kKElements;
  static constexpr int kDqElements = kAlternates ? kQElements : kQElements / kWarpgroups;  // per warpgroup and step
  static constexpr int kDqBuffers = kAlternates ? 1 : 2;
  static constexpr int kDqBarriers = kDqBuffers;
  static constexpr int kDqRowTiles = kBlockM == 64 ? 2 : 1;  // converted together, see DqRows
  static constexpr int kPartRowTiles = part_row_tiles(kBlockM, kBlockN);

  static constexpr int kListedRows = kBlockM;  // of the row tiles in SequenceTiles
  using Task = std::conditional_t<kVariant.reads_sequences, SequenceTask,
                                  std::conditional_t<kVariant.reads_mask, MaskedTask, dq_in_memory::Task>>;
  struct NoVisits {};

  struct alignas(1024) SharedStorage {
    Element k[kKElements];
    Element v[kKElements];
    Element q[kStages][kQElements];
    Element dout[kStages][kQElements];
    Element ds[kScoreStages][kBlockM * kBlockN];
    float dq[kWarpgroups][kDqBuffers][kDqElements];  // the warpgroup's dK and dV in the epilogue
    alignas(128) float lse_log2[kStages][kBlockM];
    alignas(128) float delta[kStages][kBlockM];
    Task task[2];
    Pipeline<2> task_pipeline;
    Pipeline<1> k_pipeline;
    Pipeline<1> v_pipeline;
    Pipeline<kStages> q_pipeline;     // Q and lse_log2, with kDeltaWithQ also delta
    Pipeline<kStages> dout_pipeline;  // dO, without it also delta
    Pipeline<kScoreStages> ds_pipeline;  // all consumer warps fill a stage; those that compute dQ release it
    Pipeline<kDqBarriers> dq_pipeline[kWarpgroups];
    Pipeline<2> sums_pipeline;  // the watcher: other CTAs' sums and parts for the task are complete
    Pipeline<2> draw_pipeline;  // where sequences are read at run time, the producer: the next task may be drawn
    std::conditional_t<kVariant.reads_mask, RowVisits, NoVisits> visits;
  };
  static_assert(sizeof(SharedStorage) == smem_bytes(kTile, kHeadDim, kHeadDimV));
};

}  // namespace flash_cute::sm90::backward::dq_in_memory
