// What the two CTAs of a row tile exchange through DSMEM: their parts of S, each a product over half of the columns of
// Q and K.
#pragma once

#include <cute/tensor.hpp>

#include "core/registers.cuh"
#include "sm90/common/cluster.cuh"
#include "sm90/forward/pair/pair.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::pair_by_columns {

// A warpgroup and the same one of the other CTA exchange the parts of their steps, through the buffers of their P: the
// part of S(i) is read before P(i) is written, and sent when P(i-2) has been read, by the product of the warpgroup that
// did not write it. A warp's part and its rows of P have the same address, so that warps need not wait for each other.
template <class Traits>
struct ScoreExchange {
  typename Traits::SharedStorage& smem;
  int warpgroup;
  int sent = 0;

  // Of the thread's elements 4 j to 4 j + 3.
  CUTE_DEVICE char* address(int j) const {
    int const thread = fresh_thread_index() % 128;
    return smem.p[warpgroup] + j / 4 * (kScoreBytes / 2) + thread / 32 * 2048 + (j % 4 * 32 + thread % 32) * 16;
  }

  // When S(i) is done.
  template <class Accumulator>
  CUTE_DEVICE void send(Accumulator const& tSrS) {  // (MMA, MMA_M, MMA_N)
    auto& pipeline = smem.scores_pipeline[warpgroup];
    int const phase = sent++ & 1;
    uint32_t const other = pair::rank_in_pair() ^ 1;
    wait_for_cluster(pipeline.empty[0], phase ^ 1);  // the other CTA's P of the own step before has been read
    if (fresh_thread_index() % 128 == 0) pipeline.expect({0, phase}, kScoreBytes);
    uint32_t const begin = address_in_cta(address(0), other), full = address_in_cta(pipeline.full, other);
    CUTE_UNROLL
    for (int j = 0; j < size(tSrS) / 4; ++j) {
      store_async(begin + j / 4 * (kScoreBytes / 2) + j % 4 * 512,
                  float4{tSrS(4 * j), tSrS(4 * j + 1), tSrS(4 * j + 2), tSrS(4 * j + 3)}, full);
    }
  }

  // Adds the other CTA's part. A sum of two is the same in either order, so that both CTAs have the same S.
  template <class Accumulator>
  CUTE_DEVICE void add_other_part(Accumulator& tSrS) const {  // (MMA, MMA_M, MMA_N)
    auto& pipeline = smem.scores_pipeline[warpgroup];
    wait_for_cluster(pipeline.full[0], (sent - 1) & 1);  // its four warps have sent their parts
    CUTE_UNROLL
    for (int j = 0; j < size(tSrS) / 4; ++j) {
      float4 const part = *reinterpret_cast<float4 const*>(address(j));
      tSrS(4 * j) += part.x;
      tSrS(4 * j + 1) += part.y;
      tSrS(4 * j + 2) += part.z;
      tSrS(4 * j + 3) += part.w;
    }
    __syncwarp();  // all lanes have read: P may be written
  }

  // WGMMA has read P of the other warpgroup: its buffer may receive. The part of S that was there before has been
  // added, since P was computed from the sum.
  CUTE_DEVICE void release_buffer_of_other() const {
    if (fresh_thread_index() % 32 == 0) {
      uint64_t const* const empty = smem.scores_pipeline[1 - warpgroup].empty;
      release_in_cta(address_in_cta(empty, pair::rank_in_pair() ^ 1));
    }
  }
};

}  // namespace flash_cute::sm90::forward::pair_by_columns
