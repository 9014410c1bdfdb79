// O += P V of a row tile: each warp has all rows, and 64 (or 32) columns of each slab.
#pragma once

#include <cute/tensor.hpp>

#include "fragments.cuh"
#include "softmax.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::decode::streamed {

// A thread's accumulators: (4, 16 rows, 8 columns); of 16 rows and 8 columns it has (row, 2 columns) and (row + 8, the
// same columns).
template <class Traits, int kRows>
using Accumulators =
    decltype(make_tensor<float>(Shape<_4, Int<kRows / 16>, Int<Traits::kValueParts * Traits::kWarpColumns / 8>>{}));

// The first of a thread's two columns of a block of 8.
template <class Traits>
CUTE_DEVICE int column_of(unsigned thread, int block) {
  constexpr int kBlocks = Traits::kWarpColumns / 8;  // of a slab
  return block / kBlocks * Traits::kValueColumns + thread / 32 * Traits::kWarpColumns + block % kBlocks * 8 +
         thread % 4 * 2;
}

// By the factors of the rows, which most key tiles leave 1.
template <class Acc>
CUTE_DEVICE void rescale(float const* factors, Acc& tOrO) {
  unsigned const lane = fresh_lane_index();
  constexpr int kRowBlocks = decltype(size<1>(tOrO))::value;
  float factor[2 * kRowBlocks];
  bool changed = false;
  CUTE_UNROLL
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    factor[i] = factors[8 * i + lane / 4];
    changed |= factor[i] != 1.f;
  }
  if (!__any_sync(0xffffffff, changed)) return;
  CUTE_UNROLL
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    CUTE_UNROLL
    for (int j = 0; j < size<2>(tOrO); ++j) {
      tOrO(i % 2 * 2, i / 2, j) *= factor[i];
      tOrO(i % 2 * 2 + 1, i / 2, j) *= factor[i];
    }
  }
}

// The slab of V of the keys from `first_key` of the tile on and of the columns of `kPart`.
template <class Traits, int kPart, class Acc>
CUTE_DEVICE void add_values(typename Traits::Element const* weights, typename Traits::Element const* values,
                            int first_key, int head_dim_v, unsigned thread, Acc& tOrO) {
  using Element = typename Traits::Element;
  constexpr int kBlocks = Traits::kWarpColumns / 8, kRowBlocks = decltype(size<1>(tOrO))::value;
  int const lane = thread % 32, column = thread / 32 * Traits::kWarpColumns;
  if (kPart * Traits::kValueColumns + column >= head_dim_v) return;
  Element const* const block = values + column / 64 * (64 * Traits::kValueKeys);
  CUTE_UNROLL
  for (int step = 0; step < Traits::kValueKeys / 16; ++step) {
    uint32_t a[kRowBlocks][4];
    CUTE_UNROLL
    for (int i = 0; i < kRowBlocks; ++i) {
      Element const* const source = weights + weight_offset(16 * i + lane % 16, first_key / 8 + 2 * step + lane / 16);
      SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t const*>(source), a[i][0], a[i][1], a[i][2], a[i][3]);
    }
    CUTE_UNROLL
    for (int j = 0; j < kBlocks; j += 2) {
      uint32_t b[4];
      load_right_transposed(b, block, 16 * step, column % 64 / 8 + j, lane);
      CUTE_UNROLL
      for (int n = 0; n < 2; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < kRowBlocks; ++i) {
          multiply<Element>(tOrO(_, i, kPart * kBlocks + j + n), a[i], b[2 * n], b[2 * n + 1]);
        }
      }
    }
  }
}

}  // namespace flash_cute::sm80::decode::streamed
