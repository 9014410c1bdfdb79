// The softmax of a piece. Warp w has rows w, w + 8, ... of the row tile, a lane two neighbouring keys of each. Maxima
// and sums are in shared memory, since the accumulators leave few registers.
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

// Over the lanes of a warp, of several rows at once.
template <int kRows, class Op>
CUTE_DEVICE void warp_reduce(float (&x)[kRows], Op const& op) {
  CUTE_UNROLL
  for (int distance = 16; distance > 0; distance /= 2) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) x[i] = op(x[i], __shfl_xor_sync(0xffffffff, x[i], distance));
  }
}

// P lies where the first group's scores were: rows of 64 elements, as a block's, at a pitch of 128 elements.
CUTE_DEVICE int weight_offset(int row, int vector) { return 2 * 64 * row + 8 * (vector ^ (row & 7)); }

template <class Traits, int kRows>
class Softmax {
 public:
  using Element = typename Traits::Element;
  static constexpr int kWarpRows = kRows / kWarps;

  // The maximum of a row without a key is finite, since differences to it are taken.
  CUTE_DEVICE static void clear(Storage& smem) {
    int const thread = fresh_thread_index();
    if (thread >= kRows) return;
    smem.max[thread] = -FLT_MAX;
    smem.sum[thread] = 0.f;
  }

  // Raw scores to P, and the factors of the accumulators. `first_key`: of the key tile.
  CUTE_DEVICE static void update(DecodeParams const& params, Unit const& unit, Storage& smem, int first_key,
                                 unsigned thread) {
    auto scores = make_tensor<float>(Shape<_2, Int<kWarpRows>>{});  // (neighbours, rows)
    int const lane = thread % 32, first_row = thread / 32;
    float max[kWarpRows];
    read(smem, first_row, lane, scores, max);
    flash_cute::split_keys::cap_scores_if_asked(scores, params.score);
    bool const masked = first_key < unit.whole_begin || first_key + kTileKeys > unit.whole_end;
    if (masked || params.score.slopes != nullptr) modify(params, unit, first_row, first_key + 2 * lane, scores);
    float new_max[kWarpRows];
    CUTE_UNROLL
    for (int i = 0; i < kWarpRows; ++i) new_max[i] = fmaxf(max[i], fmaxf(scores(0, i), scores(1, i)));
    warp_reduce(new_max, [](float a, float b) { return fmaxf(a, b); });
    float sum[kWarpRows];
    CUTE_UNROLL
    for (int i = 0; i < kWarpRows; ++i) {
      float const x = exp2_approx((scores(0, i) - new_max[i]) * params.scale_log2);
      float const y = exp2_approx((scores(1, i) - new_max[i]) * params.scale_log2);
      sum[i] = x + y;
      cutlass::NumericArrayConverter<Element, float, 2> const converter;
      int const offset = weight_offset(first_row + kWarps * i, lane / 4) + lane % 4 * 2;
      *reinterpret_cast<cutlass::Array<Element, 2>*>(reinterpret_cast<Element*>(smem.scores) + offset) =
          converter({x, y});
    }
    warp_reduce(sum, [](float a, float b) { return a + b; });
    if (lane != 0) return;
    CUTE_UNROLL
    for (int i = 0; i < kWarpRows; ++i) {
      int const number = first_row + kWarps * i;
      float const factor = exp2_approx((max[i] - new_max[i]) * params.scale_log2);
      smem.factors[number] = factor;
      smem.max[number] = new_max[i];
      smem.sum[number] = fmaf(smem.sum[number], factor, sum[i]);
    }
  }

 private:
  // The sums of all groups, in their order, and the rows' maxima.
  template <class Pairs>
  CUTE_DEVICE static void read(Storage const& smem, int first_row, int lane, Pairs& scores,  // (neighbours, rows)
                               float (&max)[kWarpRows]) {
    CUTE_UNROLL
    for (int i = 0; i < kWarpRows; ++i) {
      int const number = first_row + kWarps * i;
      max[i] = smem.max[number];
      CUTE_UNROLL
      for (int group = 0; group < Scores<Traits, kRows>::kGroups; ++group) {
        int const offset = score_offset<kRows>(group, number, 2 * lane);
        float2 const pair = *reinterpret_cast<float2 const*>(smem.scores + offset);
        scores(0, i) = group == 0 ? pair.x : scores(0, i) + pair.x;
        scores(1, i) = group == 0 ? pair.y : scores(1, i) + pair.y;
      }
    }
    __syncwarp();  // all lanes have read what the warp overwrites
  }

  // ALiBi and mask of keys `key` and `key + 1`. Rows that do not exist have a head, too.
  template <class Pairs>
  CUTE_DEVICE static void modify(DecodeParams const& params, Unit const& unit, int first_row, int key,
                                 Pairs& scores) {  // (neighbours, rows)
    CUTE_UNROLL
    for (int i = 0; i < kWarpRows; ++i) {
      Row const row = Row::of(params, unit, first_row + kWarps * i);
      float const slope = head_slope(params.score, unit.batch, row.head);
      int const distance = position_of(params, unit.sequence, row.index) - key;
      int const first = first_seen(params, unit.sequence, row.index);
      int const limit = seen_limit(params, unit.sequence, row.index);
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        scores(j, i) -= slope * fabsf(static_cast<float>(distance - j));
        if (key + j < first || key + j >= limit) scores(j, i) = -INFINITY;
      }
    }
  }
};

}  // namespace flash_cute::sm80::decode::streamed
