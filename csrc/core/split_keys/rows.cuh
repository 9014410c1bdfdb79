// The rows of a thread in a row tile: their queries, what they see, their softmax.
#pragma once

#include <cfloat>

#include <cute/tensor.hpp>

#include "core/score.cuh"
#include "core/softmax.cuh"
#include "softcap.cuh"
#include "traits.cuh"
#include "work.cuh"

namespace flash_cute::split_keys {

// A thread has rows lane / 4 and lane / 4 + 8 of its warp's 16.
constexpr int kRowsOfThread = 2;

struct Row {
  int number;  // in the row tile
  bool exists;
  int index;  // in the sequence
  int head;   // of the query

  CUTE_DEVICE static Row of(DecodeParams const& params, Unit const& unit, int number) {
    int const packed = unit.first_row + number;
    return {.number = number,
            .exists = number < unit.rows,
            .index = packed / params.group,
            .head = unit.head_kv * params.group + packed % params.group};
  }

  template <class Element>
  CUTE_DEVICE Element const* query(DecodeParams const& params, Unit const& unit) const {
    return static_cast<Element const*>(params.q) + unit.batch * params.q_strides.batch +
           head * params.q_strides.head + int64_t{unit.sequence.first_row + index} * params.q_strides.row;
  }
};

// Two neighbouring elements as operands of the products.
template <class Traits>
CUTE_DEVICE uint32_t operand_pair(uint32_t pair) {
  if constexpr (std::is_same_v<typename Traits::Operand, typename Traits::Element>) {
    return pair;
  } else {
    return in_float16<typename Traits::Element>(pair);
  }
}

// Reads the queries of a warp's rows from global memory: rows and columns that do not exist are zeros. Beside float8
// keys the columns of a k step have another order, see products_float8.cuh. `number`: in the row tile, of the thread's
// first row.
template <class Traits, class Fragment>
CUTE_DEVICE void load_queries(DecodeParams const& params, Unit const& unit, int number,
                              Fragment& tSrQ) {  // (MMA, 1, D / 16), MMA: (pair of columns, row, 8 columns)
  using Element = typename Traits::Element;
  int const lane = threadIdx.x % 32;
  auto words = recast<uint32_t>(tSrQ);  // ((1, 2, 2), 1, D / 16)
  CUTE_UNROLL
  for (int i = 0; i < kRowsOfThread; ++i) {
    Row const row = Row::of(params, unit, number + 8 * i);
    Element const* const q = row.query<Element>(params, unit);
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tSrQ); ++k) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const column = 16 * k + (Traits::kFloat8 ? 4 * (lane % 4) + 2 * half : 2 * (lane % 4) + 8 * half);
        bool const exists = row.exists && column < params.head_dim;
        uint32_t const pair = exists ? *reinterpret_cast<uint32_t const*>(q + column) : 0u;
        words(make_coord(_0{}, i, half), _0{}, k) = operand_pair<Traits>(pair);
      }
    }
  }
}

// The softmax of a piece. The maximum is exact, so that the largest numerator is 1.
struct PieceSoftmax {
  float max[kRowsOfThread];  // of the raw scores
  float sum[kRowsOfThread];  // of the numerators, over this thread's columns

  CUTE_DEVICE void clear() {
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      max[i] = -FLT_MAX;  // so that a row without a key has differences to it
      sum[i] = 0.f;
    }
  }

  // Raw scores to numerators; rescales the accumulator if a row of the warp has a new maximum.
  template <class Scores, class Accumulator>
  CUTE_DEVICE void update(Scores& scores,    // (rows, columns)
                          Accumulator& acc,  // (rows, head dim)
                          float scale_log2) {
    float new_max[kRowsOfThread];
    bool grown = false;
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      float largest = scores(i, _0{});
      CUTE_UNROLL
      for (int j = 1; j < size<1>(scores); ++j) largest = fmaxf(largest, scores(i, j));
      largest = quad_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
      new_max[i] = fmaxf(max[i], largest);
      grown |= new_max[i] > max[i];
    }
    if (__any_sync(0xffffffff, grown)) {
      CUTE_UNROLL
      for (int i = 0; i < kRowsOfThread; ++i) {
        float const factor = exp2_approx((max[i] - new_max[i]) * scale_log2);
        max[i] = new_max[i];
        sum[i] *= factor;
        CUTE_UNROLL
        for (int j = 0; j < size<1>(acc); ++j) acc(i, j) *= factor;
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) = exp2_approx((scores(i, j) - max[i]) * scale_log2);
        sum[i] += scores(i, j);
      }
    }
  }

  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) sum[i] = quad_reduce(sum[i], [](float a, float b) { return a + b; });
  }
};

// Softcap, ALiBi and mask of a warp's scores. `first`: the key of column 0.
template <class Scores>
CUTE_DEVICE void modify_and_mask(DecodeParams const& params, Unit const& unit, int number, int first, int keys,
                                 Scores& scores) {  // (rows, columns): pairs of columns, 8 apart
  int const own = first + 2 * (threadIdx.x % 4);
  auto const key_of = [&](int j) { return own + 8 * (j / 2) + j % 2; };
  cap_scores_if_asked(scores, params.score);
  if (params.score.slopes != nullptr) {
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      Row const row = Row::of(params, unit, number + 8 * i);
      float const slope = row.exists ? head_slope(params.score, unit.batch, row.head) : 0.f;
      int const position = position_of(params, unit.sequence, row.index);
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) -= slope * fabsf(static_cast<float>(position - key_of(j)));
      }
    }
  }
  if (first >= unit.whole_begin && first + keys <= unit.whole_end) return;
  CUTE_UNROLL
  for (int i = 0; i < kRowsOfThread; ++i) {
    int const row = Row::of(params, unit, number + 8 * i).index;
    int const first_key = first_seen(params, unit.sequence, row);
    int const key_limit = seen_limit(params, unit.sequence, row);
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); ++j) {
      bool const seen = key_of(j) >= first_key && key_of(j) < key_limit;
      if (!seen) scores(i, j) = -INFINITY;
    }
  }
}

}  // namespace flash_cute::split_keys
