// Values that the compiler recomputes at each use, instead of keeping them and what is derived from them in registers
// across the main loop. The accumulators leave few registers: values that were kept spilled.
#pragma once

#include <cute/config.hpp>

namespace flash_cute {

// Returns x, but hides its origin from the compiler, which then recomputes what depends on it.
CUTE_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
template <class T>
CUTE_DEVICE T* opaque(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

// threadIdx.x, blockIdx.x and the lane's index in its warp, read from the special registers at each call.
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
CUTE_DEVICE int fresh_lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

}  // namespace flash_cute
