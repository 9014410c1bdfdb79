// Launches a plan. Included only by the generated instance files.
#pragma once

#include <cuda_runtime.h>

#include "contract/plan.h"
#include "core/with_variant.cuh"
#include "kernel.cuh"
#include "sm90/common/launch.cuh"
#include "sm90/forward/common/maps.cuh"

namespace flash_cute::sm90::forward::fp8_rows {

template <class Traits>
cudaError_t launch_kernel(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  KernelArgs args;
  args.params = params;
  args.fp8 = *params.fp8;
  cudaError_t error = encode_maps<Traits>(args);
  if (error != cudaSuccess) return error;
  constexpr int kSmemBytes = Traits::kSmem.total;
  error = cudaFuncSetAttribute(fwd_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  Launch const shape{.ctas = plan.ctas, .threads = Traits::kThreads, .smem_bytes = kSmemBytes};
  return zero_and_launch(params.ticket, plan.workspace.zeroed, fwd_kernel<Traits>, shape, args, stream);
}

// Calls `launch` with the element type of a tensor.
template <class Launch>
cudaError_t with_format(bool is_e5m2, Launch const& launch) {
  return is_e5m2 ? launch(E5M2{}) : launch(E4M3{});
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  Fp8Terms const& terms = *params.fp8;
  if (terms.all_e4m3()) {
    return with_variant<Variant::kDense, Variant::kPacked, Variant::kModified>(
        plan.variant, [&]<Variant kVariant>() {
          using Inputs = Formats<E4M3, E4M3, E4M3>;
          if constexpr (!kVariant.modifies_scores) {
            if (!terms.exact_lse) {
              return launch_kernel<Traits<kHeadDim, kHeadDimV, kVariant, Inputs, false>>(plan, params, stream);
            }
          }
          return launch_kernel<Traits<kHeadDim, kHeadDimV, kVariant, Inputs, true>>(plan, params, stream);
        });
  }
  if constexpr (!serves_all_formats(kHeadDim, kHeadDimV)) {
    return cudaErrorInvalidValue;
  } else {
    return with_format(terms.q_is_e5m2, [&]<class Q>(Q) {
      return with_format(terms.k_is_e5m2, [&]<class K>(K) {
        return with_format(terms.v_is_e5m2, [&]<class V>(V) {
          if constexpr (std::is_same_v<Q, E4M3> && std::is_same_v<K, E4M3> && std::is_same_v<V, E4M3>) {
            return cudaErrorInvalidValue;
          } else {
            return launch_kernel<Traits<kHeadDim, kHeadDimV, Variant::kModified, Formats<Q, K, V>, true>>(
                plan, params, stream);
          }
        });
      });
    });
  }
}

}  // namespace flash_cute::sm90::forward::fp8_rows
