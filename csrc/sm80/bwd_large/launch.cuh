// Launches a plan: the lists of the sequences' tiles, the preprocess, and the kernels of dK and dV and of dQ. Included
// only by the generated instance files.
#pragma once

#include "../../core/bwd_preprocess_large.cuh"
#include "../../core/element.cuh"
#include "../../core/list_sequence_tiles.cuh"
#include "kernel.cuh"

namespace flash_cute::sm80::bwd_large {

template <class Traits>
cudaError_t launch_kernels(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  int const smem_bytes = plan.shape.smem_bytes;
  for (auto* const kernel : {bwd_keys_kernel<Traits>, bwd_queries_kernel<Traits>}) {
    cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaError_t error = launch_sequence_tiles<kTileRows, kTileRows>(params, stream);
  if (error != cudaSuccess) return error;
  error = launch_bwd_preprocess_large<typename Traits::Element, kTileRows>(plan, params, stream);
  if (error != cudaSuccess) return error;

  BwdParams const main_params = with_scaled_dout(params);
  Rings const chosen = rings(params.head_dim, params.head_dim_v, plan.entry);
  unsigned const parts = large::column_parts(params.head_dim), parts_of_dv = large::column_parts(params.head_dim_v);
  dim3 const keys_grid(static_cast<unsigned>(plan.ctas), parts + parts_of_dv);
  bwd_keys_kernel<Traits><<<keys_grid, Traits::kThreads, smem_bytes, stream>>>(main_params, chosen);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  dim3 const queries_grid(static_cast<unsigned>(plan.dq_ctas), parts);
  bwd_queries_kernel<Traits><<<queries_grid, Traits::kThreads, smem_bytes, stream>>>(main_params, chosen);
  return cudaGetLastError();
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV);
  return with_element(plan.dtype, [&]<class Element>(Element) {
    return launch_kernels<Traits<Element, kHeadDim>>(plan, params, stream);
  });
}

}  // namespace flash_cute::sm80::bwd_large
