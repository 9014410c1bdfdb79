// The scores of the forwards for large head dims: which key tiles need the mask, and what the modified kernels make of
// one tile's scores before it, softcap and ALiBi.
#pragma once

#include <cute/tensor.hpp>

#include "../../core/mask.cuh"
#include "../../core/score.cuh"
#include "../../core/sequence.cuh"
#include "../../core/softmax.cuh"
#include "../../contract/variant.h"
#include "../warpgroup.cuh"

namespace flash_cute::sm90::large {

// The key tiles that need no mask.
struct WholeTiles {
  int begin;
  int size;

  CUTE_DEVICE bool contains(int tile) const { return unsigned(tile - begin) < unsigned(size); }
};

// Of a warpgroup's kRows rows, one of kWarpgroups of the tile, which is in shared memory: see `uniform`.
template <int kRows, int kKeys, int kWarpgroups, class Tile>
CUTE_DEVICE WholeTiles whole_tiles(Tile const& tile, int warpgroup) {
  Sequence const& it = tile.sequence;
  Sequence const sequence{.len_q = uniform(it.len_q),
                          .len_k = uniform(it.len_k),
                          .band = {.lower = uniform(it.band.lower), .upper = uniform(it.band.upper)}};
  TileRange const range = key_range<kRows, kKeys>(sequence, kWarpgroups * uniform(tile.m_block) + warpgroup);
  return {.begin = range.whole_begin, .size = range.whole_end - range.whole_begin};
}

// Of the plain kernel: nothing. kRows x kKeys: a warpgroup's scores.
template <Variant kVariant, int kRows, int kKeys>
struct ScoreModifier {
  using Shift = OnlineSoftmax<2>::NoShift;

  template <class Tile, class Coords>
  CUTE_DEVICE ScoreModifier(FwdParams const&, Tile const&, Coords const&) {}
  template <class Scores, class Coords0>
  CUTE_DEVICE void operator()(Scores&, Coords0 const&, int, Shift&) const {}
};

template <int kRows, int kKeys>
struct ScoreModifier<Variant::kModified, kRows, kKeys> {
  using Shift = OnlineSoftmax<2>::Shift;

  ScoreTerms const& terms;
  float scale_log2;
  float slope;        // ALiBi's, of the tile's head
  int thread_offset;  // the thread's part of the distance from row to column
  int left_from;      // key tiles at offsets from here on have no columns on the right of the positions of their rows

  template <class Tile, class Coords>
  CUTE_DEVICE ScoreModifier(FwdParams const& params, Tile const& tile,
                            Coords const& tScS)  // (rows, columns) -> (row, column)
      : terms(params.score),
        scale_log2(params.scale_log2),
        slope(head_slope(params.score, uniform(tile.batch), uniform(tile.head))) {
    int const shift = uniform(tile.sequence.shift);
    thread_offset = shift + thread_distance(tScS);
    left_from = uniform(tile.sequence.band.upper) <= shift ? -kNoLimit : kKeys - 1 - shift;
  }

  // `offset`: the scores' first row minus their first column.
  template <class Scores, class Coords0>
  CUTE_DEVICE void operator()(Scores& scores,         // (rows, columns)
                              Coords0 const& tScS_0,  // (rows, columns) -> (row, column) of thread 0, static
                              int offset, Shift& shift) const {
    if (terms.softcap_scale != 0.f) cap_scores(scores, terms);
    shift[0] = shift[1] = 0.f;
    if (slope == 0.f) return;
    int const right_to = left_from - (kRows - 1) - (kKeys - 1), distance = offset + thread_offset;
    // Steeper slopes would cost the linear form's differences their precision.
    constexpr float kSteepest = 4.f;  // per column, in units of the exponents of 2
    bool const one_sided = offset >= left_from || offset <= right_to;
    if (one_sided && fabsf(slope) * scale_log2 <= kSteepest) {
      add_linear_biases(scores, tScS_0, offset >= left_from ? slope : -slope, distance, shift);
    } else {
      add_biases(scores, tScS_0, slope, distance);
    }
  }
};

}  // namespace flash_cute::sm90::large
