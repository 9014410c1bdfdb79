// Launches a plan. Included only by the generated instance files.
#pragma once

#include "../../core/sequence_prefix.cuh"
#include "kernel.cuh"

namespace flash_cute::sm80::fwd_large {

template <class Traits>
cudaError_t launch_kernel(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  auto* const kernel = fwd_large_kernel<Traits>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shape.smem_bytes);
  if (error != cudaSuccess) return error;
  if (params.sequences.tiles_before != nullptr) {
    row_tile_prefix_kernel<Traits::kBlockM><<<1, sequence_prefix::kThreads, 0, stream>>>(params);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  if (plan.draws_tiles) {
    error = cudaMemsetAsync(params.ticket, 0, plan.workspace.zeroed, stream);
    if (error != cudaSuccess) return error;
  }
  dim3 const grid(static_cast<unsigned>(plan.ctas), plan.draws_tiles ? 1 : plan.column_parts);
  kernel<<<grid, Traits::kThreads, plan.shape.smem_bytes, stream>>>(params, ring(params.head_dim, plan.entry));
  return cudaGetLastError();
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV);
  return plan.dtype == DType::kFloat16 ? launch_kernel<Traits<cutlass::half_t, kHeadDim>>(plan, params, stream)
                                       : launch_kernel<Traits<cutlass::bfloat16_t, kHeadDim>>(plan, params, stream);
}

}  // namespace flash_cute::sm80::fwd_large
