// The fold of the pieces of a unit, from the first to the last. The CTA that computes them and the kernel that folds
// the parts of several CTAs use these functions alone, so that the bits are equal.
#pragma once

#include <cfloat>

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

#include "core/sink.cuh"
#include "core/softmax.cuh"
#include "traits.cuh"
#include "work.cuh"

namespace flash_cute::split_keys {

// What the pieces so far, and the one that is added, are multiplied by.
struct FoldFactors {
  float before;
  float piece;

  // By their maxima, and the larger one of these.
  CUTE_DEVICE static FoldFactors of(float before, float piece, float larger, float scale_log2) {
    return {exp2_approx(__fmul_rn(__fsub_rn(before, larger), scale_log2)),
            exp2_approx(__fmul_rn(__fsub_rn(piece, larger), scale_log2))};
  }

  CUTE_DEVICE float add(float sum, float of_piece) const { return add_scaled(sum, __fmul_rn(of_piece, piece)); }
  CUTE_DEVICE float add_scaled(float sum, float scaled) const { return __fmaf_rn(sum, before, scaled); }
};

// The state of a row: of the pieces so far.
struct RowState {
  float max;
  float sum;

  // To which a piece adds itself, bit by bit: the accumulator is 0.
  CUTE_DEVICE static RowState of_nothing() { return {-FLT_MAX, 0.f}; }

  CUTE_DEVICE FoldFactors add(RowState const& piece, float scale_log2) {
    float const larger = fmaxf(max, piece.max);
    FoldFactors const factors = FoldFactors::of(max, piece.max, larger, scale_log2);
    sum = factors.add(sum, piece.sum);
    max = larger;
    return factors;
  }

  // What normalizes the accumulator; infinite or NaN where all scores of the keys that are seen are -inf.
  CUTE_DEVICE float inverse(float sink_log2, float scale_log2) const {
    return reciprocal(__fadd_rn(sum, exp2_approx(__fsub_rn(sink_log2, __fmul_rn(max, scale_log2)))));
  }

  CUTE_DEVICE float lse(float scale_log2) const {
    constexpr float kLn2 = 0.693147180559945f;
    return sum == 0.f ? -INFINITY : __fmul_rn(__fmaf_rn(max, scale_log2, log2_approx(sum)), kLn2);
  }
};

// A part in the workspace: the accumulators of its rows, then their maxima and their sums.
struct Part {
  float* acc;  // (rows, head_dim_v of the kernel)
  float* row_max;
  float* row_sum;

  // Of a bundle and a KV head, first is the fold of a unit from the first piece on.
  template <int kHeadDimV>
  CUTE_DEVICE static Part of_fold(DecodeParams const& params, Unit const& unit, int bundle) {
    return of<kHeadDimV>(params, unit, bundle, 0, params.slot_rows);
  }
  // Then come the pieces of a unit that it did not begin; `i`: since its first one.
  template <int kHeadDimV>
  CUTE_DEVICE static Part of_piece(DecodeParams const& params, Unit const& unit, int bundle, int i) {
    int const rows = min(params.slot_rows, unit.tile_rows);
    return of<kHeadDimV>(params, unit, bundle, params.slot_rows + i * rows, rows);
  }

 private:
  template <int kHeadDimV>
  CUTE_DEVICE static Part of(DecodeParams const& params, Unit const& unit, int bundle, int first_row, int rows) {
    int64_t const before = (int64_t{bundle} * params.heads_kv + unit.head_kv) * params.part_rows + first_row;
    float* const begin = params.parts + before * (kHeadDimV + 2);
    float* const row_max = begin + rows * kHeadDimV;
    return {.acc = begin, .row_max = row_max, .row_sum = row_max + rows};
  }
};

// Where a row of the result is.
template <class Element>
struct ResultRow {
  Element* out;
  float* lse;

  CUTE_DEVICE static ResultRow of(DecodeParams const& params, int batch, int head, int row) {  // row: of q
    int64_t const of_batch = params.cu_q == nullptr ? batch : 0;
    return {.out = static_cast<Element*>(params.out) + of_batch * params.out_strides.batch +
                   head * params.out_strides.head + row * params.out_strides.row,
            .lse = params.lse + (of_batch * params.heads_q + head) * params.len_q + row};
  }
};

// By which float8 keys or values of a sequence and a KV head are multiplied.
CUTE_DEVICE float factor_of(Descale const& descale, int batch, int head_kv) {
  if (descale.data == nullptr) return 1.f;
  return __ldg(descale.data + batch * descale.batch_stride + head_kv * descale.head_stride);
}

// Two neighbouring columns of the result. A row that sees no key gives 0.
template <class Element>
CUTE_DEVICE void store_pair(Element* out, float x, float y, float inverse, bool blind) {
  cutlass::Array<float, 2> values;
  values[0] = blind ? 0.f : __fmul_rn(x, inverse);
  values[1] = blind ? 0.f : __fmul_rn(y, inverse);
  cutlass::NumericArrayConverter<Element, float, 2> const converter;
  *reinterpret_cast<cutlass::Array<Element, 2>*>(out) = converter(values);
}

}  // namespace flash_cute::split_keys
