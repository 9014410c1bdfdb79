// What a forward makes of a tile's raw scores q.k before the mask: nothing, or a softcap and ALiBi biases. A type for
// each, which a kernel applies tile by tile; a further term of the score (a bias, dropout) has its place here.
#pragma once

#include <type_traits>

#include <cute/tensor.hpp>

#include "core/score.cuh"
#include "core/softmax.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::forward {

using namespace cute;

// kRows x kKeys: a warpgroup's scores.
template <int kRows, int kKeys>
struct PlainScores {
  using Shift = OnlineSoftmax<2>::NoShift;

  template <class Tile, class Lengths, class Coords>
  CUTE_DEVICE void begin(FwdParams const&, Tile const&, Lengths const&, Coords const&) {}
  template <class Scores, class Coords0>
  CUTE_DEVICE void operator()(FwdParams const&, Scores&, Coords0 const&, int, Shift&) const {}
};

template <int kRows, int kKeys>
struct ModifiedScores {
  using Shift = OnlineSoftmax<2>::Shift;

  // ALiBi, of a row tile's head and sequence. Key tiles at offsets from `left_from` on have no columns on the right of
  // the positions of rows that see them; those at `right_to` and below have none on the left.
  float slope = 0.f;
  int thread_offset = 0;  // the thread's part of the distance from row to column
  int left_from = 0;

  // `tScS()`: (rows, columns) -> (row, column).
  template <class Tile, class Lengths, class Coords>
  CUTE_DEVICE void begin(FwdParams const& params, Tile const& tile, Lengths const& lengths, Coords const& tScS) {
    slope = head_slope(params.score, uniform(tile.batch), uniform(tile.head));
    int const shift = uniform(lengths.shift);
    thread_offset = shift + thread_distance(tScS());
    left_from = uniform(lengths.band.upper) <= shift ? -kNoLimit : kKeys - 1 - shift;
  }

  // `offset`: the scores' first row minus their first column.
  template <class Scores, class Coords0>
  CUTE_DEVICE void operator()(FwdParams const& params,
                              Scores& scores,         // (rows, columns)
                              Coords0 const& tScS_0,  // (rows, columns) -> (row, column) of thread 0, static
                              int offset, Shift& shift) const {
    if (params.score.softcap_scale != 0.f) cap_scores(scores, params.score);
    shift[0] = shift[1] = 0.f;
    if (slope == 0.f) return;
    int const right_to = left_from - (kRows - 1) - (kKeys - 1), distance = offset + thread_offset;
    // Steeper slopes would cost the linear form's differences their precision.
    constexpr float kSteepest = 4.f;  // per column, in units of the exponents of 2
    bool const one_sided = offset >= left_from || offset <= right_to;
    if (one_sided && fabsf(slope) * params.scale_log2 <= kSteepest) {
      add_linear_biases(scores, tScS_0, offset >= left_from ? slope : -slope, distance, shift);
    } else {
      add_biases(scores, tScS_0, slope, distance);
    }
  }
};

template <bool kModified, int kRows, int kKeys>
using ScoresOf = std::conditional_t<kModified, ModifiedScores<kRows, kKeys>, PlainScores<kRows, kKeys>>;

}  // namespace flash_cute::sm90::forward
