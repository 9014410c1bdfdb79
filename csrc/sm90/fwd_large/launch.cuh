// Launches a plan. Included only by the generated instance files.
#pragma once

#include <cuda_runtime.h>

#include "../../core/element.cuh"
#include "../../plan.h"
#include "../launch.cuh"
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
  Launch const shape{
      .ctas = plan.ctas, .threads = Traits::kThreads, .smem_bytes = kSmemBytes, .cluster_ctas = Traits::kCtas};
  return zero_and_launch(params.ticket, plan.workspace.zeroed, fwd_large_kernel<Traits>, shape, args, stream);
}

template <int kHeadDim, Variant kVariant>
cudaError_t launch_variant(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  return with_element(plan.dtype, [&]<class Element>(Element) {
    return launch_kernel<Traits<Element, kHeadDim, kVariant>>(plan, params, stream);
  });
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
