// What csrc/ takes for granted on a device and a host compiler does not know. Included before everything.
#pragma once

#include <cstddef>
#include <cstdint>

struct DeviceIndex {
  unsigned x = 0;
  unsigned y = 0;
  unsigned z = 0;
};
inline DeviceIndex threadIdx, blockIdx, gridDim;
inline void __syncwarp(unsigned = 0xffffffff) {}
// warp.h has some of these; elsewhere nothing calls what calls them.
int __shfl_sync(unsigned, int value, int lane);
int __any_sync(unsigned, int value);
int __popc(unsigned value);
int __clz(int value);
int __ffs(int value);
template <class T>
T __ldg(T const* address);
unsigned __float_as_uint(float value);
float __uint_as_float(unsigned value);
// The upper half of (high, low) << min(shift, 32).
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((uint64_t{high} << 32 | low) << (shift < 32 ? shift : 32)) >> 32);
}

// CuTe asks for shared-memory addresses through this: here they count from the start of the SharedStorage
// that is being described.
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1
inline char const* shared_storage_begin = nullptr;
inline size_t __cvta_generic_to_shared(void const* pointer) {
  return size_t(static_cast<char const*>(pointer) - shared_storage_begin);
}

#include <algorithm>
#include <cmath>

#include <cute/tensor.hpp>
