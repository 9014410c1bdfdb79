// Launches a plan. Included only by the generated instance files.
#pragma once

#include <cuda_runtime.h>

#include "../../plan.h"
#include "../tensor_map.cuh"
#include "kernel.cuh"

namespace flash_cute::sm90::fwd {

template <class Traits>
cudaError_t encode_maps(KernelArgs& args) {
  FwdParams const& params = args.params;
  auto const encode = [&](CUtensorMap* map, void const* data, Strides strides, int rows, int heads, int box_rows) {
    return encode_map<typename Traits::Element>(map, data, strides, {params.head_dim, rows, heads, params.batch},
                                                {.rows = box_rows, .columns = Traits::kChunk});
  };
  // Without keys nothing is loaded through the maps of K and V, but they must be valid.
  bool const keys = params.len_k > 0;
  void const* const k = keys ? params.k : params.q;
  void const* const v = keys ? params.v : params.q;
  Strides const k_strides = keys ? params.k_strides : Strides{0, 0, 0};
  Strides const v_strides = keys ? params.v_strides : Strides{0, 0, 0};
  int const len_k = keys ? params.len_k : 1;
  cudaError_t error = encode(&args.q, params.q, params.q_strides, params.len_q, params.heads_q, Traits::kRows);
  if (error == cudaSuccess) error = encode(&args.k, k, k_strides, len_k, params.heads_kv, Traits::kBlockN);
  if (error == cudaSuccess) error = encode(&args.v, v, v_strides, len_k, params.heads_kv, Traits::kBlockN);
  return error;
}

template <class Traits>
cudaError_t launch_kernel(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  KernelArgs args;
  args.params = params;
  cudaError_t error = encode_maps<Traits>(args);
  if (error != cudaSuccess) return error;
  constexpr int kSmemBytes = sizeof(typename Traits::SharedStorage);
  error = cudaFuncSetAttribute(fwd_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  if (plan.workspace.zeroed > 0) {
    error = cudaMemsetAsync(params.ticket, 0, plan.workspace.zeroed, stream);
    if (error != cudaSuccess) return error;
  }
  fwd_kernel<Traits><<<unsigned(plan.ctas), Traits::kThreads, kSmemBytes, stream>>>(args);
  return cudaGetLastError();
}

template <int kHeadDim, int kEntry>
cudaError_t launch_entry(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  if constexpr (!has_entry(kHeadDim, kEntry)) {
    return cudaErrorInvalidValue;
  } else {
    constexpr TileConfig kTile = tile_config(kHeadDim, kEntry);
    return plan.dtype == DType::kFloat16
               ? launch_kernel<Traits<cutlass::half_t, kHeadDim, kTile>>(plan, params, stream)
               : launch_kernel<Traits<cutlass::bfloat16_t, kHeadDim, kTile>>(plan, params, stream);
  }
}

template <int kHeadDim>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  switch (plan.entry) {
    case kTall: return launch_entry<kHeadDim, kTall>(plan, params, stream);
    case kWide: return launch_entry<kHeadDim, kWide>(plan, params, stream);
    case kWideLate: return launch_entry<kHeadDim, kWideLate>(plan, params, stream);
    case kPair: return launch_entry<kHeadDim, kPair>(plan, params, stream);
    case kPairLate: return launch_entry<kHeadDim, kPairLate>(plan, params, stream);
    case kNarrow: return launch_entry<kHeadDim, kNarrow>(plan, params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash_cute::sm90::fwd
