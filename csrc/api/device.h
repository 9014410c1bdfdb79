// The GPU that a call is for: its figures, and how to launch on it.
#pragma once

#include "planner.h"

namespace flash_cute {

Gpu device_gpu(int device_index);

}  // namespace flash_cute

#ifndef FLASH_CUTE_NO_CUDA

#include <torch/csrc/stable/accelerator.h>

namespace flash_cute {

void check_cuda(cudaError_t error, char const* action);

// Makes a device current for PyTorch and for this library, whose CUDA runtime is linked statically and
// is not PyTorch's. PyTorch's guard restores: it knows how not to create a context on the way.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device_index);

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

cudaStream_t current_stream(int device_index);

}  // namespace flash_cute

#endif  // FLASH_CUTE_NO_CUDA
