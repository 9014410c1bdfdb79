// Conversion to float8: rounded to nearest even, saturating at the largest finite value; NaN stays NaN. And from float8
// to float16, which is exact.
#pragma once

#include <cstdint>
#include <cstring>

#include <cuda_fp16.h>

#include <cute/config.hpp>

namespace flash_cute {

constexpr float kLargestE4M3 = 448.0f;
constexpr float kLargestE5M2 = 57344.0f;

CUTE_HOST_DEVICE constexpr float largest_fp8(bool is_e5m2) { return is_e5m2 ? kLargestE5M2 : kLargestE4M3; }

// By integer arithmetic, for chips before 8.9, which have no instruction for it, and for machine code that also serves
// these. Without branches: with them, the kernels that convert had five times the instructions, and took as long to
// compile.
CUTE_HOST_DEVICE uint32_t fp8_by_integers(float x, bool is_e5m2) {
  auto const bits_of = [](float y) {
    uint32_t bits;
    memcpy(&bits, &y, sizeof bits);
    return bits;
  };
  float const least_normal = is_e5m2 ? 0x1p-14f : 0x1p-6f;
  float const magic = is_e5m2 ? 0x1p7f : 0x1p14f;  // whose last bit is worth the least subnormal
  int const dropped = is_e5m2 ? 21 : 20;           // bits of the mantissa
  uint32_t const half = is_e5m2 ? (1u << 20) - 1 : (1u << 19) - 1;
  uint32_t const bias = is_e5m2 ? (127 - 15) << 2 : (127 - 7) << 3;
  float const most = largest_fp8(is_e5m2);
  float const unlimited = x < 0 ? -x : x, size = unlimited < most ? unlimited : most;
  uint32_t const kept = bits_of(size);
  uint32_t const normal = ((kept + half + (kept >> dropped & 1)) >> dropped) - bias;
  uint32_t const subnormal = bits_of(size + magic) - bits_of(magic);
  uint32_t const rounded = (size < least_normal ? subnormal : normal) | (bits_of(x) >> 24 & 0x80);
  return x != x ? 0x7f : rounded;
}

// Two values as bytes, `low` first in memory.
CUTE_DEVICE uint32_t fp8_pair(float low, float high, bool is_e5m2) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  if (is_e5m2) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  return fp8_by_integers(low, is_e5m2) | fp8_by_integers(high, is_e5m2) << 8;
#endif
}

// Two numbers of float8 as float16. `kHalf`: of a register's low 16 bits, or of its high ones.
template <bool kE5M2, int kHalf = 0>
CUTE_DEVICE uint32_t float16_pair(uint32_t pair) {
  uint32_t result;
  if constexpr (kE5M2) {
    result = __byte_perm(pair, 0, kHalf == 0 ? 0x1404 : 0x3424);  // the bits of a float16 without the last 8
  } else if constexpr (kHalf == 1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n cvt.rn.f16x2.e4m3x2 %0, high; }"
        : "=r"(result)
        : "r"(pair));
#else
    result = float16_pair<kE5M2>(pair >> 16);
#endif
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n cvt.rn.f16x2.e4m3x2 %0, low; }"
        : "=r"(result)
        : "r"(pair));
#else
    // A float16 has the same bits, one place further to the right; its exponent is 8 less: times 256.
    uint32_t const both = __byte_perm(pair, 0, 0x1404);
    uint32_t const size = both >> 1 & 0x3f803f80u, sign = both & 0x80008000u;
    __half2 const scaled = __hmul2(reinterpret_cast<__half2 const&>(size), __half2half2(__ushort_as_half(0x5c00)));
    result = reinterpret_cast<uint32_t const&>(scaled) | sign;
    if ((pair & 0x7fu) == 0x7fu) result |= 0x00007fffu;  // NaN
    if ((pair & 0x7f00u) == 0x7f00u) result |= 0x7fff0000u;
#endif
  }
  return result;
}

}  // namespace flash_cute
