// Launches of the Hopper kernels: CTAs in clusters, and memory that is zeroed while the kernel already starts.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "dependent_launch.cuh"

namespace flash_cute::sm90 {

struct Launch {
  int64_t ctas;
  int threads;
  int smem_bytes;
  int cluster_ctas = 1;
  bool early = false;  // may start once every CTA of the kernel before has called launch_dependents
};

template <class Args>
cudaError_t launch(void (*kernel)(Args), Launch const& shape, Args const& args, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(shape.ctas));
  config.blockDim = dim3(unsigned(shape.threads));
  config.dynamicSmemBytes = size_t(shape.smem_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (shape.cluster_ctas > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {.x = unsigned(shape.cluster_ctas), .y = 1, .z = 1};
  }
  if (shape.early) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, args);
}

// Zeroes `bytes` at `memory`, a multiple of 4, and launches the kernel, which calls wait_for_kernel_before first of
// all. In a CUDA graph a kernel zeroes, beside whose end the other one starts: with a memset the GPU takes about 1 us
// more. Outside of one the GPU takes as long with either, and the host 1 to 3 us less with a memset.
template <class Args>
cudaError_t zero_and_launch(void* memory, int64_t bytes, void (*kernel)(Args), Launch shape, Args const& args,
                            cudaStream_t stream) {
  if (bytes > 0) {
    cudaStreamCaptureStatus capture;
    cudaError_t error = cudaStreamIsCapturing(stream, &capture);
    if (error != cudaSuccess) return error;
    shape.early = capture != cudaStreamCaptureStatusNone;
    if (shape.early) {
      zero_kernel<<<1, 256, 0, stream>>>(static_cast<int*>(memory), int(bytes / 4));
      error = cudaGetLastError();
    } else {
      error = cudaMemsetAsync(memory, 0, size_t(bytes), stream);
    }
    if (error != cudaSuccess) return error;
  }
  return launch(kernel, shape, args, stream);
}

}  // namespace flash_cute::sm90
