// The CTAs of a tile have a part of the columns each, and so a part of every score. They exchange the parts through
// DSMEM and add them: two CTAs in one round, four in two, with the neighbour and then with the other pair. All of them
// have the same sum, bit for bit, since in each round both sides add the same two numbers.
#pragma once

#include <cute/tensor.hpp>

#include "../../core/registers.cuh"
#include "../cluster.cuh"
#include "tile.h"

namespace flash_cute::sm90::bwd_large {

using namespace cute;

// Tells another CTA that a warp has read a buffer. Only reads come before, so that no write has to be visible in the
// cluster: a release at its scope is compiled to a fence of the whole GPU, and would be in every step's chain. A release
// in the CTA is not enough: the loads have been issued then, but those of a warp that competes with WGMMAs for shared
// memory may take longer than the other CTA's answer. So which lane arrives depends on what was loaded. `read`: a
// combination of a word of each load, whose other words arrive with it.
CUTE_DEVICE void arrive_after_reads(uint32_t barrier, uint32_t read) {
  __syncwarp();
  int const lane = __any_sync(0xffffffffu, read == 0x5555aaaau);
  jitter();
  if (fresh_lane_index() == lane) {
    asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
  }
}

// Receives a warpgroup's part; a thread has every 128th element. The thread that has read its elements may overwrite
// them, and so hand on what it makes of them.
struct alignas(1024) PartBuffer {
  static constexpr int kFours = kPartBytes / (128 * 16);
  float4 fours[kFours * 128];
};

// What a thread makes of its elements, for the thread of the same index in the other warpgroup: a fragment in 16 bits.
template <class Fragment>
CUTE_DEVICE void store_to_parts(PartBuffer& buffer, Fragment const& fragment) {
  auto const fours = recast<uint4>(fragment);
  CUTE_UNROLL
  for (int j = 0; j < size(fours); ++j) {
    reinterpret_cast<uint4*>(buffer.fours)[j * 128 + fresh_thread_index() % 128] = fours(j);
  }
}
// Returns what arrive_after_reads wants to know.
template <class Fragment>
CUTE_DEVICE uint32_t load_from_parts(PartBuffer const& buffer, Fragment& fragment) {
  auto fours = recast<uint4>(fragment);
  uint32_t read = 0;
  CUTE_UNROLL
  for (int j = 0; j < size(fours); ++j) {
    fours(j) = reinterpret_cast<uint4 const*>(buffer.fours)[j * 128 + fresh_thread_index() % 128];
    read ^= fours(j).x;
  }
  return read;
}

constexpr int exchange_rounds(int ctas) { return ctas == 4 ? 2 : 1; }

template <int kCtas>
struct ExchangeBarriers {
  static constexpr int kRounds = exchange_rounds(kCtas);
  static_assert(1 << kRounds == kCtas);
  uint64_t full;            // a part has arrived: one arrival, and the bytes
  uint64_t empty[kRounds];  // by the round: the buffer of the CTA to be sent to is free; an arrival per warp of it

  CUTE_DEVICE void init() {
    initialize_barrier(full, 1);
    for (int i = 0; i < kRounds; ++i) initialize_barrier(empty[i], 4);
  }
};

// A warpgroup's exchanges through one buffer, one per step: send, complete, and when nobody reads the buffer any more
// release.
template <int kCtas>
struct Exchange {
  static constexpr int kRounds = exchange_rounds(kCtas);

  PartBuffer& buffer;
  ExchangeBarriers<kCtas>& barriers;

  CUTE_DEVICE static uint32_t partner(int round) { return block_rank_in_cluster() ^ (1u << round); }

  template <int kRound = 0, class Accumulator>
  CUTE_DEVICE void send(Accumulator const& acc, int step) const {  // (MMA, MMA_M, MMA_N)
    static_assert(decltype(size(acc))::value == 4 * PartBuffer::kFours);
    // The partner's buffer becomes free for the first part of a step when it has been released in the step before, and
    // for the second one when the partner has read the first one of its own.
    wait_barrier(barriers.empty[kRound], (step & 1) ^ (kRound == 0));
    jitter();
    int const thread = fresh_thread_index() % 128;
    if (thread == 0) set_barrier_transaction_bytes(barriers.full, kPartBytes);
    uint32_t const target = address_in_cta(&buffer.fours[thread], partner(kRound));
    uint32_t const full = address_in_cta(&barriers.full, partner(kRound));
    CUTE_UNROLL
    for (int j = 0; j < PartBuffer::kFours; ++j) {
      float4 const part{acc(4 * j), acc(4 * j + 1), acc(4 * j + 2), acc(4 * j + 3)};
      store_async(target + j * 128 * sizeof(float4), part, full);
    }
  }

  // Leaves the sum of all CTAs' parts in acc. Returns what release wants to know.
  template <int kRound = 0, class Accumulator>
  CUTE_DEVICE uint32_t complete(Accumulator& acc, int step) const {  // (MMA, MMA_M, MMA_N)
    wait_for_cluster(barriers.full, (step * kRounds + kRound) & 1);  // the four warps of the partner have sent
    int const thread = fresh_thread_index() % 128;
    uint32_t read = 0;
    CUTE_UNROLL
    for (int j = 0; j < PartBuffer::kFours; ++j) {
      float4 const part = buffer.fours[j * 128 + thread];
      read ^= __float_as_uint(part.x);
      acc(4 * j) += part.x;
      acc(4 * j + 1) += part.y;
      acc(4 * j + 2) += part.z;
      acc(4 * j + 3) += part.w;
    }
    if constexpr (kRound + 1 < kRounds) {
      allow<kRound + 1>(read);
      send<kRound + 1>(acc, step);
      return complete<kRound + 1>(acc, step);
    } else {
      return read;
    }
  }

  // By each of the four warps that have read the buffer last, with what complete or load_from_parts has returned.
  CUTE_DEVICE void release(uint32_t read) const { allow<0>(read); }

 private:
  // The partner of a round may send.
  template <int kRound>
  CUTE_DEVICE void allow(uint32_t read) const {
    arrive_after_reads(address_in_cta(&barriers.empty[kRound], partner(kRound)), read);
  }
};

}  // namespace flash_cute::sm90::bwd_large
