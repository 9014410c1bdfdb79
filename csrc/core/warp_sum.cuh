// Prefix sums and maxima over the lanes of a warp.
#pragma once

#include <cute/config.hpp>

namespace flash_cute {

// x of this lane and of those before it, combined. By all lanes.
template <class T, class Op>
CUTE_DEVICE T inclusive_warp_scan(T x, Op op) {
  int const lane = threadIdx.x % 32;
  CUTE_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    T const other = __shfl_up_sync(0xffffffff, x, distance);
    if (lane >= distance) x = op(x, other);
  }
  return x;
}

template <class T>
CUTE_DEVICE T inclusive_warp_sum(T x) {
  return inclusive_warp_scan(x, [](T a, T b) { return a + b; });
}
CUTE_DEVICE int inclusive_warp_max(int x) {
  return inclusive_warp_scan(x, [](int a, int b) { return a > b ? a : b; });
}

}  // namespace flash_cute
