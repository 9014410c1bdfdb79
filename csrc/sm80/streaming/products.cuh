// The two kinds of product of a large head dim, by mma.sync m16n8k16, for a CTA of eight warps:
//
//   scores (64 rows x 128 keys) += left (64 x 64) right^T (128 x 64)   for each chunk of 64 columns of the head dim:
//     a warp has 32 rows and 32 keys, so that it reads 64 rows of shared memory for 1024 scores;
//   out (64 rows x 512 columns) += W (64 x 16) X (16 x 512)            for each step of 16 keys:
//     a warp has all rows and every eighth block of 8 columns: 64 columns, 128 accumulators per thread.
//
// Fragments are loaded one k step ahead of their MMA, also across the barriers between steps, see Pipeline in
// pipeline.cuh: a stage is readable one step before its step begins.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "shared.cuh"
#include "tile.h"
#include "core/mma_atom.cuh"

namespace flash_cute::sm80::streaming {

// Warp w has rows 16 (w % 2) + 32 i + [0, 16) and keys 8 (w / 2) + 32 j + [0, 8) of the scores.
template <class Element>
using ScoreMma = TiledMMA<MMA_Atom<MmaAtom<Element>>, Layout<Shape<_2, _4, _1>>>;
// Warp w has all rows, and columns 64 b + 8 w + [0, 8) of out.
template <class Element>
using OutMma = TiledMMA<MMA_Atom<MmaAtom<Element>>, Layout<Shape<_1, _8, _1>>>;

constexpr int kOutBlocks = kColumns / 64;  // of 8 columns, per warp

template <class Element, class Acc>
CUTE_DEVICE void mma(Acc&& acc,  // (4)
                     uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  MmaAtom<Element>::fma(acc(0), acc(1), acc(2), acc(3), a[0], a[1], a[2], a[3], b0, b1, acc(0), acc(1), acc(2), acc(3));
}

// Where a thread's lanes read and write in the tiles, in bytes from the tile's first element.
struct LaneOffsets {
  uint32_t left;     // of the rows' chunk
  uint32_t right;    // of the keys' chunk
  uint32_t weights;  // W as the left operand: two tiles of 64 columns
  uint32_t values;   // X: a tile of 16 rows per 64 columns

  CUTE_DEVICE static LaneOffsets of(int thread) {
    int const lane = thread % 32, warp = thread / 32;
    int const row = lane % 16, half = lane / 16;  // as the left operand: matrices down the rows, then along them
    int const row_of_8 = lane % 8, quarter = lane / 8 % 2;
    return {.left = vector_offset(16 * (warp % 2) + row, half),
            .right = vector_offset(8 * (warp / 2) + 32 * half + row_of_8, quarter),
            .weights = vector_offset(row, half),
            .values = vector_offset(kValueKeys * half + 8 * quarter + row_of_8, warp)};
  }
};

// The operands of one k step of a warp's scores.
struct ScoreFragments {
  uint32_t left[2][4];   // rows 32 i
  uint32_t right[2][4];  // keys 64 i, and 64 i + 32

  // `left_tile`, `right_tile`: the thread's addresses in the chunks.
  CUTE_DEVICE void load(uint32_t left_tile, uint32_t right_tile, int step) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) load_matrices(left[i], at_step(left_tile, step) + 32 * kRowBytes * i);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) load_matrices(right[i], at_step(right_tile, step) + 64 * kRowBytes * i);
  }

  template <class Element, class Scores>
  CUTE_DEVICE void multiply(Scores& scores) const {  // (4, 2, 4)
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) {
        mma<Element>(scores(_, i, j), left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
};

// The operands of one step of out, of its first kBlocks blocks.
struct OutFragments {
  uint32_t weights[4][4];            // rows 16 i
  uint32_t values[kOutBlocks / 2][4];  // blocks 2 i and 2 i + 1

  // `weight_tile`, `value_tile`: the thread's addresses in W and in the step's X. `step`: in the key tile.
  template <int kBlocks>
  CUTE_DEVICE void load(uint32_t weight_tile, uint32_t value_tile, int step) {
    uint32_t const weight_step = at_step(weight_tile + step / 4 * kBlockM * kRowBytes, step % 4);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) load_matrices(weights[i], weight_step + 16 * kRowBytes * i);
    CUTE_UNROLL
    for (int i = 0; i < (kBlocks + 1) / 2; ++i) {
      load_matrices_transposed(values[i], value_tile + 2 * kValueKeys * kRowBytes * i);
    }
  }

  // The blocks from kBegin to kEnd.
  template <class Element, int kBegin, int kEnd, class Out>
  CUTE_DEVICE void multiply(Out& out) const {  // (4, 4, kOutBlocks)
    CUTE_UNROLL
    for (int j = kBegin; j < kEnd; ++j) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        mma<Element>(out(_, i, j), weights[i], values[j / 2][j % 2 * 2], values[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
};

// Stores W, 16-bit and in the registers of the scores, where OutFragments::load reads it.
template <class Weights>
CUTE_DEVICE void store_weights(Weights const& weights,  // (4, 2, 4), of Element
                               uint32_t tile, int thread) {
  auto const pairs = recast<uint32_t>(weights);  // (2, 2, 4)
  int const lane = thread % 32, warp = thread / 32;
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const row = 16 * (warp % 2) + 32 * i + 8 * half + lane / 4;
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) {
        uint32_t const offset = vector_offset(row, warp / 2 + 4 * (j % 2)) + 4 * (lane % 4);
        store_shared(tile + j / 2 * kBlockM * kRowBytes + offset, pairs(half, i, j));
      }
    }
  }
}

// Stores out, 16-bit, as tiles of 64 rows and 64 columns.
template <class Out>
CUTE_DEVICE void store_out(Out const& out,  // (4, 4, kOutBlocks), of Element
                           uint32_t tiles, int thread) {
  auto const pairs = recast<uint32_t>(out);  // (2, 4, kOutBlocks)
  int const lane = thread % 32, warp = thread / 32;
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t const offset = vector_offset(16 * i + 8 * half + lane / 4, warp) + 4 * (lane % 4);
      CUTE_UNROLL
      for (int j = 0; j < kOutBlocks; ++j) store_shared(tiles + j * kBlockM * kRowBytes + offset, pairs(half, i, j));
    }
  }
}

}  // namespace flash_cute::sm80::streaming
