// Types of one sm80 forward kernel: tile, MMA, shared-memory layouts and copies.
#pragma once

#include <cute/algorithm/copy.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "sm80/forward/common/masked_tile.h"
#include "sm80/forward/common/sequence_tile.h"
#include "tile.h"
#include "contract/power_scale.h"
#include "core/sequence.cuh"
#include "contract/tile_order.h"
#include "contract/variant.h"
#include "core/mma_atom.cuh"

namespace flash_cute::sm80::forward::rows {

using namespace cute;

struct Float32Products;  // products.cuh

template <class Element_, int kHeadDim_, TileConfig kTile_, Variant kVariant_ = Variant::kDense>
struct Traits {
  using Element = Element_;
  static constexpr Variant kVariant = kVariant_;
  static constexpr TileConfig kTile = kTile_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDim;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = 32 * kWarps;
  static_assert(kHeadDim % 32 == 0 && kBlockM % (16 * kWarps) == 0 && kBlockN % 16 == 0);
  // Whether thread indices are computed again in each step, see thread_again in mainloop.cuh: else these kernels spill.
  static constexpr bool kRecomputes =
      kVariant.modifies_scores || (kVariant != Variant::kDense && (kHeadDim == 128 || kHeadDim == 256));
  static constexpr bool kRecomputesQ = kRecomputes;  // the addresses of Q, too
  // Whether what belongs to the tile (where its keys are, which key tiles it visits) is read again from shared memory.
  static constexpr bool kRereads = kVariant != Variant::kDense;
  static constexpr PowerScale kPowerScale =
      (kHeadDim == 128 && kBlockN == 48) || (kHeadDim == 256 && kBlockM == 128) ? PowerScale::kComputed
                                                                               : PowerScale::kGiven;
  // Whether a CTA finds its sequence in the offsets where there are few, see place_tile.
  static constexpr bool kSearchesOffsets = true;
  static_assert(kStages == 1 || kStages == 2);

  // Split-Q: the warps are tiled along M only, so that softmax reduces within a quad of threads.
  using Mma = TiledMMA<MMA_Atom<MmaAtom<Element>>, Layout<Shape<Int<kWarps>, _1, _1>>,
                       Tile<Int<16 * kWarps>, _16, _16>>;

  // Rows of 64 (or 32) elements, whose eight (four) 16-byte chunks are permuted by the row index, so that the eight
  // rows of an 8x8 matrix that ldmatrix reads lie in different banks.
  static constexpr int kAtomColumns = kHeadDim % 64 == 0 ? 64 : 32;
  using SmemLayoutAtom = decltype(composition(Swizzle<kAtomColumns == 64 ? 3 : 2, 3, 3>{},
                                              Layout<Shape<_8, Int<kAtomColumns>>, Stride<Int<kAtomColumns>, _1>>{}));
  using SmemLayoutQ = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>>{}));
  using SmemLayoutKV =
      decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
  // V as the second GEMM's B operand: the same memory as (head dim, key, stage).
  using SmemLayoutVt = decltype(composition(
      SmemLayoutKV{}, Layout<Shape<Int<kHeadDim>, Int<kBlockN>, Int<kStages>>,
                             Stride<Int<kBlockN>, _1, Int<kBlockN * kHeadDim>>>{}));

  using Products = Float32Products;

  using SmemCopyAtom = Copy_Atom<SM75_U32x4_LDSM_N, Element>;            // Q, K: four 8x8 matrices
  using SmemCopyAtomTransposed = Copy_Atom<SM75_U16x8_LDSM_T, Element>;  // V

  // Global memory is accessed in 16-byte chunks, neighbouring threads along a row.
  static constexpr int kChunk = 16 / sizeof(Element);
  static constexpr int kThreadsPerRow = kAtomColumns / kChunk;
  using GmemThreads =
      Layout<Shape<Int<kThreads / kThreadsPerRow>, Int<kThreadsPerRow>>, Stride<Int<kThreadsPerRow>, _1>>;
  using GmemLoad = decltype(make_tiled_copy(Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element>{},
                                            GmemThreads{}, Layout<Shape<_1, Int<kChunk>>>{}));
  using GmemStore = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{}, GmemThreads{},
                                             Layout<Shape<_1, Int<kChunk>>>{}));
  static_assert(kBlockM % (kThreads / kThreadsPerRow) == 0 && kBlockN % (kThreads / kThreadsPerRow) == 0);

  struct SharedStorage {
    alignas(128) Element q[kBlockM * kHeadDim];  // O in the epilogue
    alignas(128) Element k[kStages * kBlockN * kHeadDim];
    alignas(128) Element v[kStages * kBlockN * kHeadDim];
  };
  // The tile comes last, so that all kernels have the same offsets.
  struct SequenceStorage : SharedStorage {
    SequenceTile tile;
  };
  struct MaskedStorage : SharedStorage {
    alignas(128) RowBits columns[kStages][kMaxIntervals * kBlockN];  // of a tile of K, see MaskedTile
    MaskedTile tile;
  };
  using Storage = std::conditional_t<
      kVariant.reads_mask, MaskedStorage,
      std::conditional_t<kVariant.reads_sequences, SequenceStorage, SharedStorage>>;
  static_assert(sizeof(SharedStorage) == smem_bytes(kTile, kHeadDim));
  static_assert(sizeof(SequenceStorage) <= sizeof(SharedStorage) + kSequenceBytes);
  static_assert(sizeof(MaskedStorage) <= sizeof(SharedStorage) + masked_bytes(kTile));
};

}  // namespace flash_cute::sm80::forward::rows
