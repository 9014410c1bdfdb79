// Prefix sums over the lanes of a warp.
#pragma once

#include <cute/config.hpp>

namespace flash_cute {

// The sum of x over this lane and those before it. By all lanes.
template <class T>
CUTE_DEVICE T inclusive_warp_sum(T x) {
  int const lane = threadIdx.x % 32;
  CUTE_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    T const other = __shfl_up_sync(0xffffffff, x, distance);
    if (lane >= distance) x += other;
  }
  return x;
}

}  // namespace flash_cute
