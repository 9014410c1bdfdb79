// Types of one sm80 backward kernel: tile, MMAs, shared-memory layouts and copies.
#pragma once

#include <cute/algorithm/copy.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "tile.h"
#include "core/mma_atom.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

using namespace cute;

template <class Element_, int kHeadDim_, TileConfig kTile_>
struct Traits {
  using Element = Element_;
  static constexpr TileConfig kTile = kTile_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kQStages = kTile.q_stages;
  static constexpr int kDoutStages = kTile.dout_stages;
  static constexpr bool kPInRegs = kTile.p_in_regs();

  // 16 x 16 per warp and k step: one ldmatrix.x4 loads a warp's share of either operand.
  template <int kFirst>
  using Mma = TiledMMA<MMA_Atom<MmaAtom<Element>>, Layout<Shape<Int<kFirst>, Int<kWarps / kFirst>, _1>>,
                       Tile<Int<16 * kFirst>, Int<16 * (kWarps / kFirst)>, _16>>;
  using MmaScores = Mma<kTile.score_warps>;  // S^T = K Q^T and dP^T = V dO^T: (keys, rows)
  using MmaKeys = Mma<kTile.key_warps>;      // dV += P^T dO and dK += dS^T Q: (keys, head dim)
  using MmaQueries = Mma<kTile.row_warps>;   // dQ = dS K: (rows, head dim)

  // Rows per scores GEMM: all rows of a step, or 32 where P stays in registers.
  static constexpr int kScoreRows = kPInRegs ? 32 : kBlockM;
  static constexpr int kParts = kBlockM / kScoreRows;

  // Rows of 64 (or 32) elements, whose eight (four) 16-byte chunks are permuted by the row index, so that the eight
  // rows of an 8x8 matrix that ldmatrix reads lie in different banks.
  template <int kColumns>
  using Atom = decltype(composition(Swizzle<kColumns == 64 ? 3 : 2, 3, 3>{},
                                    Layout<Shape<_8, Int<kColumns>>, Stride<Int<kColumns>, _1>>{}));
  static constexpr int kAtomColumns = kHeadDim % 64 == 0 ? 64 : 32;
  template <int kRows, int kTiles>
  using Rows = decltype(tile_to_shape(Atom<kAtomColumns>{}, Shape<Int<kRows>, Int<kHeadDim>, Int<kTiles>>{}));
  // The same memory, transposed: (head dim, row, tile).
  template <int kRows, int kTiles>
  using Columns = decltype(composition(Rows<kRows, kTiles>{}, Layout<Shape<Int<kHeadDim>, Int<kRows>, Int<kTiles>>,
                                                                     Stride<Int<kRows>, _1, Int<kRows * kHeadDim>>>{}));
  using SmemLayoutQ = Rows<kScoreRows, kParts * kQStages>;
  using SmemLayoutQt = Columns<kScoreRows, kParts * kQStages>;
  using SmemLayoutDout = Rows<kScoreRows, kParts * kDoutStages>;
  using SmemLayoutDoutT = Columns<kScoreRows, kParts * kDoutStages>;
  using SmemLayoutK = Rows<kBlockN, 1>;  // also of V, and of dK and dV in the epilogue
  using SmemLayoutKt = Columns<kBlockN, 1>;
  // P^T and dS^T as (key, row), and dS as the A operand of dQ: (row, key).
  using ScoreAtom = Atom<kBlockM % 64 == 0 ? 64 : 32>;
  using SmemLayoutSt = decltype(tile_to_shape(ScoreAtom{}, Shape<Int<kBlockN>, Int<kBlockM>>{}));
  using SmemLayoutS = decltype(composition(
      SmemLayoutSt{}, Layout<Shape<Int<kBlockM>, Int<kBlockN>>, Stride<Int<kBlockN>, _1>>{}));

  using SmemCopyAtom = Copy_Atom<SM75_U32x4_LDSM_N, Element>;            // four 8x8 matrices
  using SmemCopyAtomTransposed = Copy_Atom<SM75_U16x8_LDSM_T, Element>;  // operands not contiguous along k
  using SmemStoreAtom = Copy_Atom<UniversalCopy<uint32_t>, Element>;

  // Global memory is accessed in 16-byte chunks, neighbouring threads along a row.
  static constexpr int kChunk = 16 / sizeof(Element);
  static constexpr int kThreadsPerRow = kAtomColumns / kChunk;
  static constexpr int kRowsAtOnce = kThreads / kThreadsPerRow;
  using GmemThreads = Layout<Shape<Int<kRowsAtOnce>, Int<kThreadsPerRow>>, Stride<Int<kThreadsPerRow>, _1>>;
  using GmemLoad = decltype(make_tiled_copy(Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element>{},
                                            GmemThreads{}, Layout<Shape<_1, Int<kChunk>>>{}));
  using GmemStore = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{}, GmemThreads{},
                                             Layout<Shape<_1, Int<kChunk>>>{}));
  static_assert(kScoreRows % kRowsAtOnce == 0 && kBlockN % kRowsAtOnce == 0 && kBlockM / 2 <= kThreads);

  static constexpr int kDqPerThread = kBlockM * kHeadDim / kThreads;

  // Row statistics have `kLseStages` and `kDeltaStages` buffers of their own.
  template <int kLseStages, int kDeltaStages>
  struct Storage {
    alignas(128) Element k[kBlockN * kHeadDim];  // dK in the epilogue
    alignas(128) Element v[kBlockN * kHeadDim];  // dV in the epilogue
    alignas(128) Element q[kQStages * kBlockM * kHeadDim];
    alignas(128) Element dout[kDoutStages * kBlockM * kHeadDim];
    alignas(128) Element ds[kBlockM * kBlockN];
    alignas(128) Element p[kPInRegs ? 0 : kBlockM * kBlockN];
    alignas(128) float lse_log2[kLseStages][kBlockM];
    alignas(128) float delta[kDeltaStages][kBlockM];

    // The buffers as tensors. A tile of Q or dO is one part of a stage.
    CUTE_DEVICE auto sQ() { return make_tensor(make_smem_ptr(q), SmemLayoutQ{}); }           // (BLK_M / parts, D, tile)
    CUTE_DEVICE auto sQt() { return make_tensor(make_smem_ptr(q), SmemLayoutQt{}); }         // (D, BLK_M / parts, tile)
    CUTE_DEVICE auto sdO() { return make_tensor(make_smem_ptr(dout), SmemLayoutDout{}); }    // (BLK_M / parts, D, tile)
    CUTE_DEVICE auto sdOt() { return make_tensor(make_smem_ptr(dout), SmemLayoutDoutT{}); }  // (D, BLK_M / parts, tile)
    CUTE_DEVICE auto sK() { return make_tensor(make_smem_ptr(k), SmemLayoutK{})(_, _, _0{}); }    // (BLK_N, D)
    CUTE_DEVICE auto sKt() { return make_tensor(make_smem_ptr(k), SmemLayoutKt{})(_, _, _0{}); }  // (D, BLK_N)
    CUTE_DEVICE auto sV() { return make_tensor(make_smem_ptr(v), SmemLayoutK{})(_, _, _0{}); }    // (BLK_N, D)
    CUTE_DEVICE auto sPt() { return make_tensor(make_smem_ptr(p), SmemLayoutSt{}); }              // (BLK_N, BLK_M)
    CUTE_DEVICE auto sdSt() { return make_tensor(make_smem_ptr(ds), SmemLayoutSt{}); }            // (BLK_N, BLK_M)
    CUTE_DEVICE auto sdS() { return make_tensor(make_smem_ptr(ds), SmemLayoutS{}); }              // (BLK_M, BLK_N)
  };
  using SharedStorage = Storage<kQStages, kDoutStages>;
  static_assert(sizeof(SharedStorage) == smem_bytes(kTile, kHeadDim));
};

}  // namespace flash_cute::sm80::backward::dq_in_memory
