// Stores O, in the type that the caller asks for, and the LSE; each warpgroup its own 64 rows.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "core/convert.cuh"
#include "core/fp8.cuh"
#include "core/fwd_normalize.cuh"
#include "core/layout.cuh"
#include "core/registers.cuh"
#include "descale.cuh"
#include "softmax.cuh"
#include "sm90/common/warpgroup.cuh"
#include "sm90/forward/common/place.cuh"
#include "sm90/forward/common/quad_transpose.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::fp8_rows {

// Where a thread's elements go: its first row and columns, and how many of both there are from there on.
struct Destination {
  void* out;  // of the first row's column 0
  int64_t row_stride;
  int rows;
  int columns;  // of out
};

// Two neighbouring elements of the accumulator as a word of 16-bit ones.
template <class Element>
CUTE_DEVICE uint32_t pack(float a, float b) {
  auto const pair = cutlass::NumericArrayConverter<Element, float, 2>{}({a, b});
  return reinterpret_cast<uint32_t const&>(pair);
}

template <class Element, class Acc>
CUTE_DEVICE void store_16_bits(Acc const& acc,  // (rows, columns)
                               Destination const& to, unsigned thread) {
  int const column = 8 * (thread % 4);
  auto* const out = static_cast<Element*>(to.out) + column;
  CUTE_UNROLL
  for (int i = 0; i < size<0>(acc); ++i) {
    CUTE_UNROLL
    for (int j = 0; j < size<1>(acc); j += 8) {
      uint4 const piece = quad_transpose(
          {pack<Element>(acc(i, j), acc(i, j + 1)), pack<Element>(acc(i, j + 2), acc(i, j + 3)),
           pack<Element>(acc(i, j + 4), acc(i, j + 5)), pack<Element>(acc(i, j + 6), acc(i, j + 7))},
          thread);
      if (8 * i < to.rows && 4 * j + column < to.columns) {
        *reinterpret_cast<uint4*>(out + 8 * i * to.row_stride + 4 * j) = piece;
      }
    }
  }
}

// Columns outside, rows inside: whether a thread stores a column need not be kept, for which there is no register.
template <class Acc>
CUTE_DEVICE void store_float32(Acc const& acc, Destination const& to, unsigned thread) {
  int const column = 2 * (thread % 4);
  auto* const out = static_cast<float*>(to.out) + column;
  CUTE_UNROLL
  for (int j = 0; j < size<1>(acc); j += 2) {
    CUTE_UNROLL
    for (int i = 0; i < size<0>(acc); ++i) {
      if (8 * i < to.rows && 4 * j + column < to.columns) {
        *reinterpret_cast<float2*>(out + 8 * i * to.row_stride + 4 * j) = {acc(i, j), acc(i, j + 1)};
      }
    }
  }
}

// Values past the format's largest one become that.
template <class Acc>
CUTE_DEVICE void store_8_bits(Acc const& acc, bool is_e5m2, Destination const& to, unsigned thread) {
  int const column = 2 * (thread % 4);
  auto* const out = static_cast<uint8_t*>(to.out) + column;
  CUTE_UNROLL
  for (int j = 0; j < size<1>(acc); j += 2) {
    CUTE_UNROLL
    for (int i = 0; i < size<0>(acc); ++i) {
      uint32_t const pair = fp8_pair(acc(i, j), acc(i, j + 1), is_e5m2);
      if (8 * i < to.rows && 4 * j + column < to.columns) {
        *reinterpret_cast<uint16_t*>(out + 8 * i * to.row_stride + 4 * j) = uint16_t(pair);
      }
    }
  }
}

// `sequence`: a Sequence; for dense batches the parameters themselves.
template <class Traits, class Lengths, class Accumulator>
CUTE_DEVICE void epilogue(FwdParams const& params, Fp8Terms const& terms, Lengths const& sequence,
                          TileCoord const& tile, int warpgroup,
                          Softmax<Traits::kExactLse> const& softmax,
                          Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  unsigned const thread = unsigned(fresh_thread_index()) % 128;
  int const first_row = warpgroup_first_row<Traits>(params, tile.m_block, warpgroup) + first_row_of_thread(thread);
  auto const coords = [&](int i, auto) { return make_coord(8 * i, thread % 4); };  // a row from first_row on, a column
  auto acc = rowcol_view(tOrO);  // (rows, columns)

  float const sink_log2 = head_sink_log2<float>(params.sinks, tile.head);
  bool const to_8_bits = terms.out_type == OutType::kE4M3 || terms.out_type == OutType::kE5M2;
  bool const by_columns = terms.v.data != nullptr && terms.v.block_stride != 0 && tile.batch < params.batch;
  float factor = by_columns ? 1.f : head_factor(terms.v, tile.batch, tile.head_kv, params.batch);
  if (to_8_bits) factor /= head_factor(terms.out, tile.batch, tile.head, params.batch);
  if (by_columns) {  // before normalize, which gives rows that see no key 0 whatever their factors are
    float const* const of_columns = entries_of(terms.v, tile.batch, tile.head_kv);
    CUTE_UNROLL
    for (int j = 0; j < size<1>(acc); ++j) {
      int const column = 4 * (j - j % 2) + 2 * (thread % 4) + j % 2;
      float const of_column = column < terms.v.blocks ? __ldg(of_columns + column * terms.v.block_stride) : 1.f;
      CUTE_UNROLL
      for (int i = 0; i < size<0>(acc); ++i) acc(i, j) *= of_column;
    }
  }
  float* const lse = params.lse + lse_offset(params, sequence, tile);
  normalize(sequence, lse, first_row, softmax, acc, coords,
            [&](int i) { return softmax.inverse(i, sink_log2) * factor; });
  int const bytes = terms.out_type == OutType::kFloat32 ? 4 : to_8_bits ? 1 : 2;
  Destination const to{.out = static_cast<char*>(params.out) + bytes * out_offset(params, sequence, tile, first_row),
                       .row_stride = params.out_strides.row,
                       .rows = written_rows(sequence) - first_row,
                       .columns = params.head_dim_v};
  switch (terms.out_type) {
    case OutType::kFloat16: return store_16_bits<cutlass::half_t>(acc, to, thread);
    case OutType::kBFloat16: return store_16_bits<cutlass::bfloat16_t>(acc, to, thread);
    case OutType::kFloat32: return store_float32(acc, to, thread);
    case OutType::kE4M3: return store_8_bits(acc, false, to, thread);
    case OutType::kE5M2: return store_8_bits(acc, true, to, thread);
  }
}

}  // namespace flash_cute::sm90::forward::fp8_rows
