// Launches a plan. Included only by the generated instance files.
#pragma once

#include "core/element.cuh"
#include "core/sequence_prefix.cuh"
#include "kernel.cuh"

namespace flash_cute::sm80::forward::streamed {

template <class Traits, class... Args>
cudaError_t launch_kernel(void (*kernel)(FwdParams const, Ring const, Args...), FwdPlan const& plan,
                          FwdParams const& params, cudaStream_t stream, Args... args) {
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shape.smem_bytes);
  if (error != cudaSuccess) return error;
  if (params.sequences.tiles_before != nullptr) {
    row_tile_prefix_kernel<Traits::kBlockM><<<1, sequence_prefix::kThreads, 0, stream>>>(params);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  if (plan.workspace.zeroed > 0) {
    error = cudaMemsetAsync(params.ticket, 0, plan.workspace.zeroed, stream);
    if (error != cudaSuccess) return error;
  }
  dim3 const grid(static_cast<unsigned>(plan.ctas), Traits::kPaired ? 1 : plan.column_parts);
  kernel<<<grid, Traits::kThreads, plan.shape.smem_bytes, stream>>>(params, ring(params.head_dim, plan.entry), args...);
  return cudaGetLastError();
}

template <class Element, int kHeadDim>
cudaError_t launch_for(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  if (plan.pairs_ctas) {
    using Pairs = PairTraits<Element, kHeadDim>;
    return launch_kernel<Pairs>(fwd_streamed_pair_kernel<Pairs>, plan, params, stream,
                                static_cast<int>(plan.row_tiles));
  }
  using Lone = Traits<Element, kHeadDim>;
  return launch_kernel<Lone>(fwd_streamed_kernel<Lone>, plan, params, stream);
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV);
  return with_element(plan.dtype, [&]<class Element>(Element) {
    return launch_for<Element, kHeadDim>(plan, params, stream);
  });
}

}  // namespace flash_cute::sm80::forward::streamed
