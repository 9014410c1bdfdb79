// What the warpgroups and CTAs of a tile hand to each other: parts of the scores, which are summed over the CTAs of a
// side, and the 16-bit fragments of P and dS that are made of them.
//
// A CTA sends each CTA of its cluster a piece of its part, by st.async, which counts the bytes at the receiver's
// barrier. The receiver adds the pieces of each side in the order of the CTAs, makes a piece of P and of dS, and sends
// these to the CTAs that multiply them. No buffer needs a barrier that says that it is free
// (docs/sm90_backward_large.md).
#pragma once

#include <cute/tensor.hpp>

#include "core/registers.cuh"
#include "sm90/common/cluster.cuh"
#include "tile.h"

namespace flash_cute::sm90::backward::dq_in_registers_large {

using namespace cute;

// Pieces of a step's parts, by the CTA that sent them. A thread has every 128th element.
template <int kCtas>
struct alignas(1024) PartBuffer {
  static constexpr int kFours = kPartBytes / 16 / 128 / kCtas;  // per thread
  float4 fours[kCtas][kFours][128];
};

// P or dS of a step. A thread has every 128th element: its fragment in the order of the registers.
struct alignas(1024) FragmentBuffer {
  static constexpr int kFours = kFragmentBytes / 16 / 128;  // per thread
  uint4 fours[kFours][128];
};

template <class Fragment>
CUTE_DEVICE void store_fragment(FragmentBuffer& buffer, Fragment const& fragment) {
  auto const fours = recast<uint4>(fragment);
  static_assert(decltype(size(fours))::value == FragmentBuffer::kFours);
  CUTE_UNROLL
  for (int j = 0; j < FragmentBuffer::kFours; ++j) buffer.fours[j][fresh_thread_index() % 128] = fours(j);
}
template <class Fragment>
CUTE_DEVICE void load_fragment(FragmentBuffer const& buffer, Fragment& fragment) {
  auto fours = recast<uint4>(fragment);
  static_assert(decltype(size(fours))::value == FragmentBuffer::kFours);
  CUTE_UNROLL
  for (int j = 0; j < FragmentBuffer::kFours; ++j) fours(j) = buffer.fours[j][fresh_thread_index() % 128];
}

// Sends each CTA its piece of a part. By a warpgroup.
template <int kCtas, class Accumulator>
CUTE_DEVICE void send_parts(PartBuffer<kCtas>& buffer, uint64_t& full, Accumulator const& acc) {
  constexpr int kFours = PartBuffer<kCtas>::kFours;
  static_assert(decltype(size(acc))::value == 4 * kFours * kCtas);
  void const* const own = &buffer.fours[block_rank_in_cluster()][0][fresh_thread_index() % 128];
  CUTE_UNROLL
  for (int cta = 0; cta < kCtas; ++cta) {
    uint32_t const target = address_in_cta(own, cta), barrier = address_in_cta(&full, cta);
    CUTE_UNROLL
    for (int j = 0; j < kFours; ++j) {
      int const i = 4 * (cta * kFours + j);
      store_async(target + j * sizeof(buffer.fours[0][0]), float4{acc(i), acc(i + 1), acc(i + 2), acc(i + 3)}, barrier);
    }
  }
}

// Sums the pieces of the CTAs first, first + stride, ... By a warpgroup.
template <int kStride, int kCtas, class Accumulator>
CUTE_DEVICE void sum_pieces(PartBuffer<kCtas> const& buffer, int first, Accumulator& acc) {
  constexpr int kFours = PartBuffer<kCtas>::kFours;
  static_assert(decltype(size(acc))::value == 4 * kFours);
  CUTE_UNROLL
  for (int cta = 0; cta < kCtas; cta += kStride) {
    CUTE_UNROLL
    for (int j = 0; j < kFours; ++j) {
      float4 const part = buffer.fours[first + cta][j][fresh_thread_index() % 128];
      acc(4 * j) = cta == 0 ? part.x : acc(4 * j) + part.x;
      acc(4 * j + 1) = cta == 0 ? part.y : acc(4 * j + 1) + part.y;
      acc(4 * j + 2) = cta == 0 ? part.z : acc(4 * j + 2) + part.z;
      acc(4 * j + 3) = cta == 0 ? part.w : acc(4 * j + 3) + part.w;
    }
  }
}

// Sends this CTA's piece of P or dS, in 16 bits, to another CTA. By a warpgroup.
template <int kCtas, class Fragment>
CUTE_DEVICE void send_fragment(FragmentBuffer& buffer, uint64_t& full, Fragment const& piece, int cta) {
  constexpr int kFours = FragmentBuffer::kFours / kCtas;
  auto const fours = recast<float4>(piece);
  static_assert(decltype(size(fours))::value == kFours);
  auto const& own = buffer.fours[block_rank_in_cluster() * kFours];
  uint32_t const target = address_in_cta(&own[fresh_thread_index() % 128], cta), barrier = address_in_cta(&full, cta);
  CUTE_UNROLL
  for (int j = 0; j < kFours; ++j) store_async(target + j * sizeof(own), fours(j), barrier);
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
