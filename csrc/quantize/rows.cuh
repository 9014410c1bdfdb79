// A thread's part of a block: 8 neighbouring columns of 8 rows. kLanes threads side by side hold a row.
#pragma once

#include <cutlass/numeric_types.h>

#include "core/convert.cuh"
#include "params.h"
#include "sequences.cuh"

namespace flash_cute::quantize {

constexpr int kColumns = 8;   // of a thread
constexpr int kRowStep = 16;  // rows that the CTA holds side by side
constexpr int kRows = kBlockRows / kRowStep;  // of a thread
template <int kLanes>
constexpr int kThreads = kRowStep * kLanes;

// Whether the kernel that rotates serves calls without a rotation too: those of float32 and of wide heads are too rare
// to be worth the time that kernels of their own take to compile.
template <class Element, int kLanes>
constexpr bool kServesBoth = sizeof(Element) == 4 || kLanes == 32;

// What a thread has of a row as it is in memory: 16 bytes, or 32 of float32.
template <class Element>
struct Vector {
  uint4 words[sizeof(Element) * kColumns / sizeof(uint4)];
};

struct Values {
  float at[kColumns];
};

template <class Element>
CUTE_DEVICE Values unpack(Vector<Element> const& vector) {
  Values values;
  if constexpr (sizeof(Element) == 4) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint4 const word = vector.words[i];
      values.at[4 * i] = __uint_as_float(word.x);
      values.at[4 * i + 1] = __uint_as_float(word.y);
      values.at[4 * i + 2] = __uint_as_float(word.z);
      values.at[4 * i + 3] = __uint_as_float(word.w);
    }
  } else {
    uint32_t const words[] = {vector.words[0].x, vector.words[0].y, vector.words[0].z, vector.words[0].w};
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      float2 const pair = flash_cute::unpack<Element>(words[i]);
      values.at[2 * i] = pair.x;
      values.at[2 * i + 1] = pair.y;
    }
  }
  return values;
}

// Where a thread's columns are, and its first row in the block; the next is kRowStep further.
template <int kLanes>
struct Place {
  int lane = threadIdx.x % kLanes;
  int first_row = threadIdx.x / kLanes;
  int column = lane * kColumns;
};

// The thread's part of a block's rows, or of a part of them from row `first` on; zeros stand for what is not there. The
// last reading of x does not keep it in caches.
template <bool kIsLast, int kLanes, int kCount, class Element>
CUTE_DEVICE void load_rows(Vector<Element> (&rows)[kCount], int first, Params const& params, Block const& at,
                           Place<kLanes> const& place) {
  constexpr int kWords = sizeof(rows[0].words) / sizeof(uint4);
  Element const* const begin =
      static_cast<Element const*>(params.x) + at.offset(params.strides) + place.column +
      (first + place.first_row) * params.strides.row;
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    uint4 const* const source = reinterpret_cast<uint4 const*>(begin + i * kRowStep * params.strides.row);
    bool const is_there = first + place.first_row + i * kRowStep < at.rows && place.column < params.head_dim;
    CUTE_UNROLL
    for (int word = 0; word < kWords; ++word) {
      rows[i].words[word] = !is_there ? uint4{} : kIsLast ? __ldcs(source + word) : __ldg(source + word);
    }
  }
}

// The orthogonal transform of the row's parts of params.hadamard columns: signs, then a Walsh-Hadamard transform over
// 1 / sqrt(their number). By whole warps. Not contracted to FMAs: the CPU path has the same roundings.
CUTE_DEVICE void rotate(Values& values, Params const& params, int lane) {
  uint32_t const signs = params.signs.words[lane / 4] >> (lane % 4 * kColumns);
  CUTE_UNROLL
  for (int i = 0; i < kColumns; ++i) {
    values.at[i] = signs >> i & 1 ? -values.at[i] : values.at[i];
  }
  CUTE_UNROLL
  for (int distance = 1; distance < kColumns; distance *= 2) {
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      if (i & distance) continue;
      float const a = values.at[i], b = values.at[i + distance];
      values.at[i] = __fadd_rn(a, b);
      values.at[i + distance] = __fsub_rn(a, b);
    }
  }
  for (int distance = 1; distance < params.hadamard / kColumns; distance *= 2) {
    float const own = lane & distance ? -1.0f : 1.0f;
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      float const other = __shfl_xor_sync(0xffffffff, values.at[i], distance);
      values.at[i] = __fmaf_rn(own, values.at[i], other);  // exact product: a + b, or b's lane a - b
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < kColumns; ++i) values.at[i] = __fmul_rn(values.at[i], params.hadamard_scale);
}

}  // namespace flash_cute::quantize
