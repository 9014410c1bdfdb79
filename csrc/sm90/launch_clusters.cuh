// The launch of a kernel whose CTAs run in clusters of Traits::kCtas.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_cute::sm90 {

template <class Traits, class Args>
cudaError_t launch_clusters(void (*kernel)(Args), int64_t ctas, int smem_bytes, Args const& args,
                            cudaStream_t stream) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {.x = Traits::kCtas, .y = 1, .z = 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(ctas));
  config.blockDim = dim3(Traits::kThreads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = Traits::kCtas > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace flash_cute::sm90
