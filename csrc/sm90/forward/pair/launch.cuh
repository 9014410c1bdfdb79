// Launches a kernel for large head dims: its tensor maps, and its grid. Included only by the generated instance files.
#pragma once

#include <cuda_runtime.h>

#include "core/element.cuh"
#include "core/with_variant.cuh"
#include "contract/plan.h"
#include "sm90/forward/common/args.cuh"
#include "sm90/common/launch.cuh"
#include "sm90/common/sequence_map.cuh"

namespace flash_cute::sm90::forward::pair {

using forward::KernelArgs;

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
  encode(&args.q, params.q, params.q_strides, params.head_dim, params.len_q, params.heads_q, Traits::kRows);
  encode(&args.k, keys ? params.k : params.q, keys ? params.k_strides : none, params.head_dim, len_k, params.heads_kv,
         Traits::kBlockN);
  encode(&args.v, keys ? params.v : params.q, keys ? params.v_strides : none, params.head_dim_v, len_k, params.heads_kv,
         Traits::kUnitKeys);
  return error;
}

template <class Traits>
cudaError_t launch_kernel(void (*kernel)(KernelArgs), FwdPlan const& plan, FwdParams const& params,
                          cudaStream_t stream) {
  KernelArgs args;
  args.params = params;
  cudaError_t error = encode_maps<Traits>(args);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
  if (error != cudaSuccess) return error;
  Launch const shape{.ctas = plan.ctas,
                     .threads = Traits::kThreads,
                     .smem_bytes = Traits::kSmemBytes,
                     .cluster_ctas = Traits::kCtas};
  return zero_and_launch(params.ticket, plan.workspace.zeroed, kernel, shape, args, stream);
}

// `kernel_of(Traits{})`: the kernel of these traits.
template <template <class, int, Variant> class Traits, int kHeadDim, class KernelOf>
cudaError_t launch_plan(KernelOf const& kernel_of, FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  return with_element(plan.dtype, [&]<class Element>(Element) {
    return with_variant<Variant::kPacked, Variant::kModified>(plan.variant, [&]<Variant kVariant>() {
      Traits<Element, kHeadDim, kVariant> const traits;
      return launch_kernel<Traits<Element, kHeadDim, kVariant>>(kernel_of(traits), plan, params, stream);
    });
  });
}

}  // namespace flash_cute::sm90::forward::pair
