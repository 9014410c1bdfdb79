// Launches a plan: the lists of the sequences' tiles, the preprocess, dK and dV, dQ. Included only by the generated
// instance files.
#pragma once

#include <cuda_runtime.h>

#include "../../core/bwd_preprocess_large.cuh"
#include "../../core/list_sequence_tiles.cuh"
#include "../encode_bwd_maps.cuh"
#include "keys.cuh"
#include "queries.cuh"

namespace flash_cute::sm90::bwd_large {

template <class Traits, class Kernel>
cudaError_t launch_clusters(Kernel* kernel, int64_t ctas, KernelArgs const& args, cudaStream_t stream) {
  cudaError_t const error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {.x = Traits::kCtas, .y = 1, .z = 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(ctas));
  config.blockDim = dim3(Traits::kThreads);
  config.dynamicSmemBytes = Traits::kSmemBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <class Traits>
cudaError_t launch_kernels(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  KernelArgs args{};
  args.params = with_scaled_dout(params);
  MapBoxes const boxes{.query_rows = kTileRows, .key_rows = kTileRows, .columns = Traits::kChunk};
  cudaError_t error = encode_bwd_maps<typename Traits::Element, Traits::kVariant>(args, boxes);
  if (error != cudaSuccess) return error;
  error = launch_sequence_tiles<kTileRows, kTileRows>(params, stream);
  if (error != cudaSuccess) return error;
  error = launch_bwd_preprocess_large<typename Traits::Element, kTileRows>(plan, params, stream);
  if (error != cudaSuccess) return error;
  error = launch_clusters<Traits>(bwd_keys_kernel<Traits>, plan.ctas, args, stream);
  if (error != cudaSuccess) return error;
  return launch_clusters<Traits>(bwd_queries_kernel<Traits>, plan.dq_ctas, args, stream);
}

template <int kHeadDim, Variant kVariant>
cudaError_t launch_variant(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  return plan.dtype == DType::kFloat16
             ? launch_kernels<Traits<cutlass::half_t, kHeadDim, kVariant>>(plan, params, stream)
             : launch_kernels<Traits<cutlass::bfloat16_t, kHeadDim, kVariant>>(plan, params, stream);
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV);
  switch (plan.variant) {
    case Variant::kPacked: return launch_variant<kHeadDim, Variant::kPacked>(plan, params, stream);
    case Variant::kModified: return launch_variant<kHeadDim, Variant::kModified>(plan, params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash_cute::sm90::bwd_large
