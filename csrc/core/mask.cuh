// What a row sees. A mask is the first column that a row does not see, and its inverse, the first row that
// sees a column; the range of tiles, which of them need masking, and the masking itself all follow.
#pragma once

#include <climits>

#include <cute/tensor.hpp>

#include "../params.h"
#include "variant.h"

namespace flash_cute {

using namespace cute;

struct FullMask {
  template <class Params>
  CUTE_HOST_DEVICE static int column_limit(Params const& params, int /*row*/) {
    return params.len_k;
  }
  template <class Params>
  CUTE_HOST_DEVICE static int first_row(Params const& /*params*/, int /*column*/) {
    return 0;
  }
};

struct CausalMask {
  // Negative where the row sees nothing.
  template <class Params>
  CUTE_HOST_DEVICE static int column_limit(Params const& params, int row) {
    return min(params.len_k, row + params.diagonal + 1);
  }
  // May be len_q or more: no row sees the column.
  template <class Params>
  CUTE_HOST_DEVICE static int first_row(Params const& params, int column) {
    return max(0, column - params.diagonal);
  }
};

// The key tiles that a query tile visits: [0, unmasked) whole, [unmasked, end) element by element.
struct KeyRange {
  int unmasked;
  int end;
};

template <class Mask, int kBlockM, int kBlockN, class Params>
CUTE_HOST_DEVICE KeyRange key_range(Params const& params, int m_block) {
  int const first_row = m_block * kBlockM;
  int const last_row = min(first_row + kBlockM, params.len_q) - 1;
  int const first_limit = max(0, Mask::column_limit(params, first_row));
  int const last_limit = max(0, Mask::column_limit(params, last_row));
  return {first_limit / kBlockN, ceil_div(last_limit, kBlockN)};
}

// The query tiles that a key tile is seen by, for the backward: [begin, unmasked) need masking element by
// element, [unmasked, end) are seen whole. A key tile that reaches past len_k is masked throughout.
struct RowRange {
  int begin;
  int unmasked;
  int end;
};

template <class Mask, int kBlockM, int kBlockN>
CUTE_HOST_DEVICE RowRange row_range(BwdParams const& params, int n_block) {
  int const first_column = n_block * kBlockN;
  int const end = ceil_div(params.len_q, kBlockM);
  int const begin = min(end, Mask::first_row(params, first_column) / kBlockM);
  bool const tail = first_column + kBlockN > params.len_k;
  int const unmasked = tail ? end : ceil_div(Mask::first_row(params, first_column + kBlockN - 1), kBlockM);
  return {begin, max(begin, min(end, unmasked)), end};
}

// Sets the scores of one tile that a row does not see to -inf. tScS holds each score's (row, column)
// within the tile for this thread, tScS_0 for thread 0: their columns differ by one number a thread, so
// each comparison is with a constant.
template <class Mask, class Scores, class Coords, class Coords0, class Params>
CUTE_DEVICE void apply_mask(Scores& scores,              // (rows, columns)
                            Coords const& tScS,          // (rows, columns) -> (row, column)
                            Coords0 const& tScS_0,       // the same of thread 0, static
                            Params const& params, int first_row, int first_column) {
  int const thread_column = first_column + get<1>(tScS(_0{}, _0{}));
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    int const row = first_row + get<0>(tScS(i, _0{}));
    int const limit = Mask::column_limit(params, row) - thread_column;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); ++j) {
      if (int(get<1>(tScS_0(_0{}, j))) >= limit) {
        scores(i, j) = -INFINITY;
      }
    }
  }
}

// The same for a transposed tile: tScS holds (column, row).
template <class Mask, class Scores, class Coords, class Coords0>
CUTE_DEVICE void apply_mask_transposed(Scores& scores,         // (columns, rows)
                                       Coords const& tScS,     // (columns, rows) -> (column, row)
                                       Coords0 const& tScS_0,  // the same of thread 0, static
                                       BwdParams const& params, int first_row, int first_column) {
  int const thread_row = first_row + get<1>(tScS(_0{}, _0{}));
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    int const column = first_column + get<0>(tScS(i, _0{}));
    int const begin = column < params.len_k ? Mask::first_row(params, column) - thread_row : INT_MAX;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); ++j) {
      if (int(get<1>(tScS_0(_0{}, j))) < begin) {
        scores(i, j) = -INFINITY;
      }
    }
  }
}

// Whether a row sees any column: decides between "no key" (out 0) and "keys, all at -inf" (out NaN).
template <class Mask>
CUTE_HOST_DEVICE bool row_sees_a_key(FwdParams const& params, int row) {
  return Mask::column_limit(params, row) > 0;
}

}  // namespace flash_cute
