// Types of the kernels of attention over a KV cache: tile, MMA, and the layouts of shared memory.
#pragma once

#include <type_traits>

#include <cute/algorithm/copy.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "contract/split_keys.h"
#include "core/mma_atom.cuh"
#include "work.cuh"

namespace flash_cute::split_keys {

using namespace cute;

// Of a cache of float8, whose two tensors are of either type.
struct Float8 {
  uint8_t bits;
};

template <class Element_, int kHeadDim_, int kHeadDimV_, class Cache_ = Element_>
struct Traits {
  using Element = Element_;  // of q and out
  using Cache = Cache_;
  static constexpr bool kFloat8 = std::is_same_v<Cache, Float8>;
  // Of the products' operands: float8 numbers are float16 numbers, too.
  using Operand = std::conditional_t<kFloat8, cutlass::half_t, Element>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kTileKeys = tile_keys(kHeadDim);
  using Cut = PlainCut<kTileKeys>;
  static constexpr bool kQInShared = q_in_shared(kHeadDim, kHeadDimV, sizeof(Cache));

  // Of one warp: it computes 16 rows.
  using Mma = TiledMMA<MMA_Atom<MmaAtom<Operand>>, Layout<Shape<_1, _1, _1>>, Tile<_16, _16, _16>>;

  // Rows of 64 elements, whose eight 16-byte chunks are permuted by the row index, as a TMA box of 128-byte rows has
  // them: the eight rows of an 8x8 matrix that ldmatrix reads lie in different banks.
  static constexpr int kChunk = 64;
  static constexpr int kChunkK = chunk_of<Cache>(kHeadDim), kChunkV = chunk_of<Cache>(kHeadDimV);  // of a TMA box
  using SmemLayoutAtom =
      decltype(composition(Swizzle<3, 3, 3>{}, Layout<Shape<_8, Int<kChunk>>, Stride<Int<kChunk>, _1>>{}));
  using SmemLayoutK = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kTileKeys>, Int<kHeadDim>>{}));
  using SmemLayoutV = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kTileKeys>, Int<kHeadDimV>>{}));
  // V as the second product's B operand: the same memory as (head dim, key).
  using SmemLayoutVt = decltype(composition(
      SmemLayoutV{}, Layout<Shape<Int<kHeadDimV>, Int<kTileKeys>>, Stride<Int<kTileKeys>, _1>>{}));

  using SmemCopyAtom = Copy_Atom<SM75_U32x4_LDSM_N, Element>;            // K: four 8x8 matrices
  using SmemCopyAtomTransposed = Copy_Atom<SM75_U16x8_LDSM_T, Element>;  // V

  // Whether the four warps compute 64 rows together, by WarpgroupProducts of the derived traits.
  static constexpr bool kHasWarpgroupProducts = false;

  // Whether the ring gives the keys of a tile before the values of the one before are released.
  static constexpr bool kScoresAhead = false;

  static constexpr int kStageElements = kTileKeys * cute::max(kHeadDim, kHeadDimV);  // of Cache: one tile of K or of V
};

// What the warps of a CTA exchange at the end of a piece, the fold of a unit's pieces, and perhaps Q.
template <int kHeadDim, int kHeadDimV, int kBytes>
struct ConsumerStorage {
  alignas(16) float acc[kManyRows * kHeadDimV];  // in the order of the MMA's fragments, as Q
  alignas(16) char q[cute::max(16, q_bytes(kHeadDim, kHeadDimV, kBytes))];
  float row_max[kConsumerWarps][kFewRows];
  float row_sum[kConsumerWarps][kFewRows];
};

}  // namespace flash_cute::split_keys
