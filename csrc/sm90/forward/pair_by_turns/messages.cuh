// What the two CTAs of a row tile send each other through DSMEM: after each step P, with its rows' maxima in use and
// limits; at the end of a tile the sums. Thread t of either CTA has the same rows, and P is sent as the registers of
// the product's operand, so that a lane reads what the same lane of the other CTA has written.
#pragma once

#include <cute/tensor.hpp>

#include "core/registers.cuh"
#include "sm90/common/cluster.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::pair_by_turns {

// A message needs no barrier for an empty buffer: that of step i + 2 is sent when that of step i + 1 has been received,
// which the other CTA sends after it has read that of step i. Between tiles the sums do the same: they are sent when
// the last message has been read, and the next tile's first one follows when they have been received.
template <class Traits>
struct Messages {
  static constexpr int kVectorsOfP = Traits::kVectorsOfP;

  typename Traits::SharedStorage& smem;
  int warpgroup;
  int warp;  // of the warpgroup
  int received = 0;
  int tiles = 0;

  // P in words of two elements, and of the thread's two rows maximum in use and limit.
  template <class Words>
  CUTE_DEVICE void send(Words const& p, float const (&offset)[2], float const (&limit)[2]) {
    jitter();
    Buffer const to(smem.messages[warpgroup][warp], smem.message_pipeline[warpgroup][warp]);
    CUTE_UNROLL
    for (int j = 0; j < kVectorsOfP; ++j) to.store(j, {p(4 * j), p(4 * j + 1), p(4 * j + 2), p(4 * j + 3)});
    to.store(kVectorsOfP, packed(offset, limit));
  }
  template <class Words>
  CUTE_DEVICE void receive(Words& p, float (&offset)[2], float (&limit)[2]) {
    uint4 const* const vectors = wait<kVectorsOfP + 1>(smem.messages[warpgroup][warp],
                                                       smem.message_pipeline[warpgroup][warp], received++ & 1);
    CUTE_UNROLL
    for (int j = 0; j < kVectorsOfP; ++j) {
      uint4 const words = vectors[j * 32];
      p(4 * j) = words.x;
      p(4 * j + 1) = words.y;
      p(4 * j + 2) = words.z;
      p(4 * j + 3) = words.w;
    }
    unpack(vectors[kVectorsOfP * 32], offset, limit);
  }

  CUTE_DEVICE void send_sums(float const (&sum)[2], float const (&error)[2]) {
    auto& pipeline = smem.sums_pipeline[warpgroup][warp];
    wait_for_cluster(pipeline.empty[0], (tiles & 1) ^ 1);  // the other CTA has read those of the last tile
    Buffer(smem.sums[warpgroup][warp], pipeline).store(0, packed(sum, error));
  }
  CUTE_DEVICE void receive_sums(float (&sum)[2], float (&error)[2]) {
    unpack(*wait<1>(smem.sums[warpgroup][warp], smem.sums_pipeline[warpgroup][warp], tiles++ & 1), sum, error);
  }
  // When O has been stored, which uses the sums: see release_in_cta.
  CUTE_DEVICE void release_sums() const {
    __syncwarp();  // all lanes have used them
    uint64_t const* const empty = smem.sums_pipeline[warpgroup][warp].empty;
    if (fresh_lane_index() == 0) release_in_cta(address_in_cta(empty, pair::rank_in_pair() ^ 1));
  }

 private:
  // The other CTA's, of which each lane writes one vector in 32.
  struct Buffer {
    uint32_t begin;
    uint32_t full;

    CUTE_DEVICE Buffer(uint4* own, Pipeline<1>& pipeline)
        : begin(address_in_cta(own + fresh_lane_index(), pair::rank_in_pair() ^ 1)),
          full(address_in_cta(pipeline.full, pair::rank_in_pair() ^ 1)) {}
    CUTE_DEVICE void store(int j, uint4 const& vector) const {
      store_async(begin + j * 32 * sizeof(uint4), vector, full);
    }
  };

  // Returns the lane's first vector of a buffer of this CTA, when all its lanes' kVectors have arrived.
  template <int kVectors>
  CUTE_DEVICE static uint4 const* wait(uint4 const* own, Pipeline<1>& pipeline, int phase) {
    int const lane = fresh_lane_index();
    if (lane == 0) pipeline.expect({0, phase}, kVectors * 32 * sizeof(uint4));
    wait_for_cluster(pipeline.full[0], phase);
    return own + lane;
  }

  CUTE_DEVICE static uint4 packed(float const (&a)[2], float const (&b)[2]) {
    return {__float_as_uint(a[0]), __float_as_uint(b[0]), __float_as_uint(a[1]), __float_as_uint(b[1])};
  }
  CUTE_DEVICE static void unpack(uint4 const& vector, float (&a)[2], float (&b)[2]) {
    a[0] = __uint_as_float(vector.x);
    b[0] = __uint_as_float(vector.y);
    a[1] = __uint_as_float(vector.z);
    b[1] = __uint_as_float(vector.w);
  }
};

}  // namespace flash_cute::sm90::forward::pair_by_turns
