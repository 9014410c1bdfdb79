// Launches a plan. Included only by the generated instance files.
#pragma once

#include <cuda_runtime.h>

#include "core/element.cuh"
#include "core/with_variant.cuh"
#include "contract/plan.h"
#include "sm90/common/launch.cuh"
#include "sm90/forward/common/maps.cuh"
#include "kernel.cuh"

namespace flash_cute::sm90::forward::rows {

template <class Traits>
cudaError_t launch_kernel(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  KernelArgs args;
  args.params = params;
  cudaError_t error = encode_maps<Traits>(args);
  if (error != cudaSuccess) return error;
  constexpr int kSmemBytes = sizeof(typename Traits::SharedStorage);
  error = cudaFuncSetAttribute(fwd_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  Launch const shape{.ctas = plan.ctas, .threads = Traits::kThreads, .smem_bytes = kSmemBytes};
  return zero_and_launch(params.ticket, plan.workspace.zeroed, fwd_kernel<Traits>, shape, args, stream);
}

template <int kHeadDim, int kHeadDimV, int kEntry, Variant kVariant>
cudaError_t launch_kernel(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  if constexpr (!has_kernel(kHeadDim, kHeadDimV, kEntry, kVariant)) {
    return cudaErrorInvalidValue;
  } else {
    constexpr TileConfig kTile = tile_config(kHeadDim, kEntry, kHeadDimV);
    return with_element(plan.dtype, [&]<class Element>(Element) {
      return launch_kernel<Traits<Element, kHeadDim, kTile, kVariant, kHeadDimV>>(plan, params, stream);
    });
  }
}

template <int kHeadDim, int kHeadDimV, int kEntry>
cudaError_t launch_entry(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  return with_variant<Variant::kDense, Variant::kPacked, Variant::kModified>(
      plan.variant,
      [&]<Variant kVariant>() { return launch_kernel<kHeadDim, kHeadDimV, kEntry, kVariant>(plan, params, stream); });
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  switch (plan.entry) {
    case kRows256: return launch_entry<kHeadDim, kHeadDimV, kRows256>(plan, params, stream);
    case kRows192: return launch_entry<kHeadDim, kHeadDimV, kRows192>(plan, params, stream);
    case kRows192Late: return launch_entry<kHeadDim, kHeadDimV, kRows192Late>(plan, params, stream);
    case kRows128: return launch_entry<kHeadDim, kHeadDimV, kRows128>(plan, params, stream);
    case kRows128Late: return launch_entry<kHeadDim, kHeadDimV, kRows128Late>(plan, params, stream);
    case kRows64: return launch_entry<kHeadDim, kHeadDimV, kRows64>(plan, params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash_cute::sm90::forward::rows
