// Launches a plan. Included only by the generated instance files.
#pragma once

#include <cuda_runtime.h>

#include "../../plan.h"
#include "../sequence_map.cuh"
#include "kernel.cuh"

namespace flash_cute::sm90::fwd_large {

template <class Traits>
cudaError_t encode_maps(KernelArgs& args) {
  using Element = typename Traits::Element;
  FwdParams const& params = args.params;
  bool const packed = params.sequences.cu_q != nullptr;
  cudaError_t error = cudaSuccess;
  auto const encode = [&](CUtensorMap* map, void const* data, Strides const& strides, int columns, int rows, int heads,
                          int box_rows) {
    if (error != cudaSuccess) return;
    error = encode_sequence_map<Element>(map, data, strides, {columns, rows, heads, params.batch}, packed,
                                         {.rows = box_rows, .columns = Traits::kChunk});
  };
  // Without keys nothing is loaded through the maps of K and V, but they must be valid.
  bool const keys = params.len_k > 0;
  Strides const none{0, 0, 0};
  int const len_k = keys ? params.len_k : 1;
  encode(&args.q, params.q, params.q_strides, params.head_dim, params.len_q, params.heads_q, kBlockM);
  encode(&args.k, keys ? params.k : params.q, keys ? params.k_strides : none, params.head_dim, len_k, params.heads_kv,
         kBlockN);
  encode(&args.v, keys ? params.v : params.q, keys ? params.v_strides : none, params.head_dim_v, len_k, params.heads_kv,
         kUnitKeys);
  return error;
}

template <class Traits>
cudaError_t launch_kernel(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  KernelArgs args;
  args.params = params;
  cudaError_t error = encode_maps<Traits>(args);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(fwd_large_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  if (plan.workspace.zeroed > 0) {
    error = cudaMemsetAsync(params.ticket, 0, plan.workspace.zeroed, stream);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {.x = Traits::kCtas, .y = 1, .z = 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(plan.ctas));
  config.blockDim = dim3(Traits::kThreads);
  config.dynamicSmemBytes = kSmemBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = Traits::kCtas > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, fwd_large_kernel<Traits>, args);
}

template <int kHeadDim, Variant kVariant>
cudaError_t launch_variant(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  return plan.dtype == DType::kFloat16
             ? launch_kernel<Traits<cutlass::half_t, kHeadDim, kVariant>>(plan, params, stream)
             : launch_kernel<Traits<cutlass::bfloat16_t, kHeadDim, kVariant>>(plan, params, stream);
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV);
  switch (plan.variant) {
    case Variant::kPacked: return launch_variant<kHeadDim, Variant::kPacked>(plan, params, stream);
    case Variant::kModified: return launch_variant<kHeadDim, Variant::kModified>(plan, params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash_cute::sm90::fwd_large
