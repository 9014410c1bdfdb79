// Launches a plan: the lists of the sequences' tiles, the preprocess, and the kernels of dK and dV and of dQ. Included
// only by the generated instance files.
#pragma once

#include <type_traits>

#include "core/bwd_preprocess_large.cuh"
#include "core/element.cuh"
#include "core/list_sequence_tiles.cuh"
#include "kernel.cuh"

namespace flash_cute::sm80::backward::streamed {

template <class... Args>
cudaError_t launch_kernel(void (*kernel)(Args...), dim3 grid, int smem_bytes, cudaStream_t stream,
                          std::type_identity_t<Args> const&... args) {
  cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<grid, streaming::kThreads, smem_bytes, stream>>>(args...);
  return cudaGetLastError();
}

template <class Element, int kHeadDim>
cudaError_t launch_kernels(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  using Lone = Traits<Element, kHeadDim>;
  using Pairs = PairTraits<Element, kHeadDim>;
  cudaError_t error = launch_sequence_tiles<kTileRows, kTileRows>(params, stream);
  if (error != cudaSuccess) return error;
  error = launch_bwd_preprocess_large<Element, kTileRows>(plan, params, stream);
  if (error != cudaSuccess) return error;
  int const pairs = std::max(plan.key_pairs, plan.row_pairs);
  if (pairs > 0) {
    error = cudaMemsetAsync(params.pairs, 0, zeroed_bytes(pairs), stream);
    if (error != cudaSuccess) return error;
  }

  BwdParams const main_params = with_scaled_dout(params);
  Rings const chosen = rings(params.head_dim, params.head_dim_v, plan.entry);
  int const smem_bytes = plan.shape.smem_bytes;
  unsigned const parts = streaming::column_parts(params.head_dim);
  unsigned const parts_of_dv = streaming::column_parts(params.head_dim_v);
  dim3 const keys_grid(static_cast<unsigned>(plan.ctas), plan.key_pairs > 0 ? 1 : parts + parts_of_dv);
  error = plan.key_pairs > 0 ? launch_kernel(bwd_keys_pair_kernel<Pairs>, keys_grid, smem_bytes, stream, main_params,
                                             chosen, pair_memory(params.pairs, pairs, 0))
                             : launch_kernel(bwd_keys_kernel<Lone>, keys_grid, smem_bytes, stream, main_params, chosen);
  if (error != cudaSuccess) return error;
  dim3 const queries_grid(static_cast<unsigned>(plan.dq_ctas), plan.row_pairs > 0 ? 1 : parts);
  return plan.row_pairs > 0
             ? launch_kernel(bwd_queries_pair_kernel<Pairs>, queries_grid, smem_bytes, stream, main_params, chosen,
                             pair_memory(params.pairs, pairs, 1))
             : launch_kernel(bwd_queries_kernel<Lone>, queries_grid, smem_bytes, stream, main_params, chosen);
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV);
  return with_element(plan.dtype, [&]<class Element>(Element) {
    return launch_kernels<Element, kHeadDim>(plan, params, stream);
  });
}

}  // namespace flash_cute::sm80::backward::streamed
