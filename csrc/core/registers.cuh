// Values that the compiler recomputes at each use instead of keeping them, and what follows from them, in registers across
// the main loop. The accumulators leave few registers: what was kept spilled.
#pragma once

#include <cute/config.hpp>

namespace flash_cute {

// x, without the compiler knowing where it came from.
CUTE_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// threadIdx.x and blockIdx.x, read from the special registers each time.
CUTE_DEVICE int fresh_thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
CUTE_DEVICE int fresh_block_index() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

}  // namespace flash_cute
