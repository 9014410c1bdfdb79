// The softmax of a piece. Warp w has rows w, w + 8, ... of the row tile, a lane two neighbouring keys of each.
#pragma once

#include <cfloat>

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

#include "core/score.cuh"
#include "core/split_keys/rows.cuh"
#include "scores.cuh"

namespace flash_cute::sm80::decode::streamed {

using flash_cute::split_keys::first_seen;
using flash_cute::split_keys::position_of;
using flash_cute::split_keys::seen_limit;

template <class Op>
CUTE_DEVICE float warp_reduce(float x, Op op) {
  CUTE_UNROLL
  for (int i = 16; i > 0; i /= 2) x = op(x, __shfl_xor_sync(0xffffffff, x, i));
  return x;
}

// P lies where the first group's scores were: rows of 64 elements, as a block's, at a pitch of 128 elements.
CUTE_DEVICE int weight_offset(int row, int vector) { return 2 * 64 * row + 8 * (vector ^ (row & 7)); }

template <class Traits, int kRows>
class Softmax {
 public:
  using Element = typename Traits::Element;
  static constexpr int kWarpRows = kRows / kWarps;

  float max[kWarpRows];  // of the raw scores, exact, so that the largest numerator is 1
  float sum[kWarpRows];  // of the numerators, of the lane's keys

  CUTE_DEVICE static int row_of(int i) { return threadIdx.x / 32 + kWarps * i; }

  CUTE_DEVICE void clear() {
    CUTE_UNROLL
    for (int i = 0; i < kWarpRows; ++i) {
      max[i] = -FLT_MAX;  // so that a row without a key has differences to it
      sum[i] = 0.f;
    }
  }

  // The sums over all lanes.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < kWarpRows; ++i) sum[i] = warp_reduce(sum[i], [](float a, float b) { return a + b; });
  }

  // Raw scores to P, and the factors of the accumulators. `first_key`: of the key tile.
  CUTE_DEVICE void update(DecodeParams const& params, Unit const& unit, Storage& smem, int first_key) {
    auto scores = make_tensor<float>(Shape<_2, Int<kWarpRows>>{});  // (neighbours, rows)
    read(smem.scores, scores);
    if (params.score.softcap_scale != 0.f) cap_scores_by_tanh(scores, params.score);
    int const lane = threadIdx.x % 32, key = first_key + 2 * lane;
    bool const masked = first_key < unit.whole_begin || first_key + kTileKeys > unit.whole_end;
    CUTE_UNROLL
    for (int i = 0; i < kWarpRows; ++i) {
      int const number = row_of(i);
      float factor = 1.f;
      if (number < unit.rows) {
        float2 score{scores(0, i), scores(1, i)};
        if (masked || params.score.slopes != nullptr) modify(params, unit, number, key, score);
        float const largest = warp_reduce(fmaxf(score.x, score.y), [](float a, float b) { return fmaxf(a, b); });
        float const new_max = fmaxf(max[i], largest);
        factor = exp2_approx((max[i] - new_max) * params.scale_log2);
        max[i] = new_max;
        score = {exp2_approx((score.x - new_max) * params.scale_log2), exp2_approx((score.y - new_max) * params.scale_log2)};
        sum[i] = fmaf(sum[i], factor, score.x + score.y);
        cutlass::NumericArrayConverter<Element, float, 2> const converter;
        auto* const weights = reinterpret_cast<Element*>(smem.scores) + weight_offset(number, lane / 4) + lane % 4 * 2;
        *reinterpret_cast<cutlass::Array<Element, 2>*>(weights) = converter({score.x, score.y});
      }
      if (lane == 0) smem.factors[number] = factor;
    }
  }

 private:
  // The sums of all groups, in their order.
  template <class Pairs>
  CUTE_DEVICE static void read(float const* shared, Pairs& scores) {  // (neighbours, rows)
    CUTE_UNROLL
    for (int i = 0; i < kWarpRows; ++i) {
      CUTE_UNROLL
      for (int group = 0; group < Scores<Traits, kRows>::kGroups; ++group) {
        int const offset = score_offset<kRows>(group, row_of(i), threadIdx.x % 32 * 2);
        float2 const pair = *reinterpret_cast<float2 const*>(shared + offset);
        scores(0, i) = group == 0 ? pair.x : scores(0, i) + pair.x;
        scores(1, i) = group == 0 ? pair.y : scores(1, i) + pair.y;
      }
    }
    __syncwarp();  // all lanes have read the rows, in which P is written
  }

  // ALiBi and mask of keys `key` and `key + 1`.
  CUTE_DEVICE static void modify(DecodeParams const& params, Unit const& unit, int number, int key, float2& score) {
    Row const row = Row::of(params, unit, number);
    if (params.score.slopes != nullptr) {
      float const slope = head_slope(params.score, unit.batch, row.head);
      int const distance = position_of(params, unit.sequence, row.index) - key;
      score.x -= slope * fabsf(static_cast<float>(distance));
      score.y -= slope * fabsf(static_cast<float>(distance - 1));
    }
    int const first = first_seen(params, unit.sequence, row.index);
    int const limit = seen_limit(params, unit.sequence, row.index);
    if (key < first || key >= limit) score.x = -INFINITY;
    if (key + 1 < first || key + 1 >= limit) score.y = -INFINITY;
  }
};

}  // namespace flash_cute::sm80::decode::streamed
