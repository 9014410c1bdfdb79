// Ordered accesses to the counters and flags in global memory by which CTAs wait for one another.
#pragma once

#include <cute/config.hpp>

namespace flash_cute {

// What another CTA stored before it released the value that is read is visible afterwards.
CUTE_DEVICE int load_acquire(int const* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// What the thread stored before, and what it saw of other threads through a barrier, is visible before the value is.
CUTE_DEVICE void store_release(int* address, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// The same for an increment.
CUTE_DEVICE void increment_release(int* address) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(address) : "memory");
}

}  // namespace flash_cute
