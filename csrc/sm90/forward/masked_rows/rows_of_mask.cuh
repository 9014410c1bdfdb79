// The lengths of a row tile with a mask, as the epilogue asks for them: which rows see a key, the softmax tells.
#pragma once

#include "core/fwd_normalize.cuh"
#include "core/place.cuh"

namespace flash_cute::sm90::forward::masked_rows {

struct MaskedRows {
  FwdParams const& params;
  OnlineSoftmax<2> const& softmax;  // after finish()

  CUTE_DEVICE operator FwdParams const&() const { return params; }
};

// A row whose sum is 0 has no score above -inf. (With a mask it counts as one that sees no key, also where it sees some
// and all of their scores are -inf.) A thread's second row is 8 below its first.
CUTE_DEVICE bool row_sees_a_key(MaskedRows const& rows, int row) {
  return (row % 16 < 8 ? rows.softmax.sum[0] : rows.softmax.sum[1]) != 0.f;
}
CUTE_DEVICE int written_rows(MaskedRows const& rows) { return rows.params.len_q; }
CUTE_DEVICE int first_row(MaskedRows const&) { return 0; }

}  // namespace flash_cute::sm90::forward::masked_rows
