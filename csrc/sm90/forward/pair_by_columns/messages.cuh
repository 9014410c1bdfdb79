// What the two warpgroups of a CTA tell each other: after each step P, the maximum in use and the limit of each row,
// and whether a maximum has grown; at the end of a tile the sums. A warpgroup has one buffer, which the other one has
// read when it releases it. Thread t of either warpgroup has the same rows.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/softmax.cuh"
#include "sm90/common/warpgroup.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::pair_by_columns {

// A pair of numbers for each of a thread's two rows.
using RowPairs = float2[2];

template <class Traits>
struct Messages {
  using Element = typename Traits::Element;

  typename Traits::SharedStorage& smem;
  int warpgroup;
  int sent = 0;
  int received = 0;

  // `write` writes what else belongs to the message.
  template <class Write>
  CUTE_DEVICE void send(RowPairs const& pairs, bool grown, Write const& write) {
    PipelineState<1> const state{0, sent++ & 1};
    smem.message[warpgroup].wait_empty(state);  // the other warpgroup has read the last message
    write();
    int const thread = fresh_thread_index();
    if (thread % 4 == 0) {
      float2* const rows = smem.rows[warpgroup] + first_row_of_thread(thread);
      rows[0] = pairs[0];
      rows[8] = pairs[1];
    }
    if (thread % 32 == 0) smem.grown[warpgroup][thread / 32 % 4] = grown;
    tma_store_fence();  // the async proxy reads P, through WGMMA
    smem.message[warpgroup].arrive_full(state);
  }

  // Returns whether a maximum has grown in any of the four warps' rows: the same in all warps.
  CUTE_DEVICE bool receive(RowPairs& pairs) {
    smem.message[1 - warpgroup].wait_full({0, received++ & 1});  // its four warps have written it
    float2 const* const rows = smem.rows[1 - warpgroup] + first_row_of_thread(fresh_thread_index());
    pairs[0] = rows[0];
    pairs[1] = rows[8];
    return uniform(*reinterpret_cast<int const*>(smem.grown[1 - warpgroup])) != 0;
  }
  // The message has been read by the warp.
  CUTE_DEVICE void release() { smem.message[1 - warpgroup].release({}); }
};

// Follows the maxima of the other warpgroup's step, where some have grown. No product into acc is in flight.
template <class Accumulator>
CUTE_DEVICE void follow_maxima(OnlineSoftmax<2>& softmax, RowPairs const& pairs,
                               Accumulator& acc) {  // (rows, head dim)
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    float const factor = exp2_approx(softmax.offset[i] - pairs[i].x);
    softmax.offset[i] = pairs[i].x;
    softmax.limit[i] = pairs[i].y;
    softmax.sum[i] *= factor;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(acc); ++j) acc(i, j) *= factor;
  }
}

}  // namespace flash_cute::sm90::forward::pair_by_columns
