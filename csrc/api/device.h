// The GPU of a call: its properties, its stream, and making it current.
#pragma once

#include "planner.h"

namespace flash_cute {

Gpu device_gpu(int device_index);

// The name of a device's model, as in "NVIDIA H200", and whether any device of this process is such a one.
std::string const& device_model(int device_index);
bool some_device_is(std::string_view model);

}  // namespace flash_cute

#ifndef FLASH_CUTE_NO_CUDA

#include <cuda.h>
#include <torch/csrc/stable/accelerator.h>

namespace flash_cute {

void check_cuda(cudaError_t error, char const* action);

// Makes this thread's context current again at its end, if there was one.
class ContextBefore {
 public:
  ContextBefore();
  ~ContextBefore();
  ContextBefore(ContextBefore const&) = delete;

 private:
  CUcontext before_;
};

// Makes a device and its primary context current, both for PyTorch and for this library, which links its own CUDA
// runtime statically. At its end PyTorch's guard restores the device before: it can do so without creating a context
// there. Then a context that somebody made current with the driver is again.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device_index);

 private:
  ContextBefore context_;  // before the guard, so that it has the last word
  torch::stable::accelerator::DeviceGuard guard_;
};

cudaStream_t current_stream(int device_index);

}  // namespace flash_cute

#endif  // FLASH_CUTE_NO_CUDA
