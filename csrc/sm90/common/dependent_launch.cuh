// Programmatic dependent launch: a kernel starts while the one before it in the stream still runs.
#pragma once

#include <cute/config.hpp>

#include "pipeline.cuh"

namespace flash_cute::sm90 {

// The next kernel may start when every CTA has called this or has ended.
CUTE_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the kernel before has ended; what it and all before it wrote is visible then. Returns at once where the
// launch was an ordinary one.
CUTE_DEVICE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// One CTA. (A template, so that the files that launch it share it.)
template <class Word>
__global__ void zero_kernel(Word* words, int count) {
  launch_dependents();
  jitter();
  for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) words[i] = 0;
}

}  // namespace flash_cute::sm90
