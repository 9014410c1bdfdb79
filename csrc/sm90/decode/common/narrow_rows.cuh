// Single rows of 64 bytes. TMA's boxes begin at multiples of 128 bytes of shared memory, so that it cannot write every
// row of a tile alone, as pages of an odd number of keys need. There a thread copies a row by cp.async, to where TMA
// would.
#pragma once

#include <cute/arch/util.hpp>
#include <cute/config.hpp>

namespace flash_cute::sm90::decode {

constexpr int kNarrowRow = 64;  // bytes

// `to`: the row, of a tile whose address is a multiple of 512. `bytes` of it are copied, those behind are zeros.
CUTE_DEVICE void copy_narrow_row(void* to, void const* from, int bytes) {
  constexpr int kVector = 16;
  uint32_t const row = cute::cast_smem_ptr_to_uint(to);
#pragma unroll 1
  for (int begin = 0; begin < kNarrowRow; begin += kVector) {
    uint32_t const place = row + begin ^ (row >> 7 & 3) * kVector;  // TMA's swizzle of 64 bytes
    int const count = min(kVector, max(0, bytes - begin));
    auto const* const source = static_cast<char const*>(from) + (count > 0 ? begin : 0);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(source), "r"(count) : "memory");
  }
}

// The barrier's phase does not end before the thread's copies have arrived. It must have an arrival to come, which
// another instruction makes.
CUTE_DEVICE void wait_for_copies_at(uint64_t& barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(cute::cast_smem_ptr_to_uint(&barrier))
               : "memory");
}

}  // namespace flash_cute::sm90::decode
