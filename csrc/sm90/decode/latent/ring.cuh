// The ring of key tiles. A tile's chunks of columns arrive one by one; they are released in three parts: the columns of
// V of each warpgroup when it has added their product, and the columns behind V when the scores are there.
#pragma once

#include "sm90/common/pipeline.cuh"
#include "tile.h"

namespace flash_cute::sm90::decode::latent {

using namespace cute;

CUTE_DEVICE void wait_for(uint64_t& barrier, int phase) {
  wait_barrier(barrier, phase);
  jitter();
}

// One arrival of the warp, which a warp-wide instruction precedes.
CUTE_DEVICE void arrive_once(uint64_t& barrier) {
  jitter();
  if (threadIdx.x % 32 == 0) arrive_barrier(barrier);
}

// The chunk that a warpgroup multiplies at `step`, as the scores of its tiles are summed: first those of its own
// columns of V, which it has released before the other warpgroup releases its own.
CUTE_DEVICE int chunk_at(int step, int warpgroup) {
  constexpr int kLast = kWarpgroups * kColumnChunks;
  if (step == kColumnChunks) return kLast;
  int const chunk = step < kColumnChunks ? step : step - 1;
  return (chunk + warpgroup * kColumnChunks) % kLast;
}

// Calls f(part, first chunk, Int<chunks>) for each part of a tile, in that order. `warpgroup`: which computes the
// scores.
template <class F>
CUTE_DEVICE void for_parts(int warpgroup, F const& f) {
  f(warpgroup, warpgroup * kColumnChunks, C<kColumnChunks>{});
  f(kWarpgroups, kWarpgroups * kColumnChunks, C<1>{});
  f(1 - warpgroup, (1 - warpgroup) * kColumnChunks, C<kColumnChunks>{});
}

// `arrivals`: of those that load a chunk.
template <class SharedStorage>
CUTE_DEVICE void init_ring(SharedStorage& smem, int arrivals) {
  for (int stage = 0; stage < kStages; ++stage) {
    for (int chunk = 0; chunk < kChunks; ++chunk) initialize_barrier(smem.full[stage][chunk], arrivals);
    for (int part = 0; part <= kWarpgroups; ++part) initialize_barrier(smem.empty[stage][part], 4);
  }
  for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
    for (int warp = 0; warp < 4; ++warp) initialize_barrier(smem.sent[warpgroup][warp], 1);
  }
}

}  // namespace flash_cute::sm90::decode::latent
