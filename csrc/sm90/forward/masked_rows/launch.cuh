// Launches a plan. Included only by the generated instance files.
#pragma once

#include <cuda_runtime.h>

#include "contract/plan.h"
#include "core/element.cuh"
#include "core/with_variant.cuh"
#include "kernel.cuh"
#include "sm90/common/launch.cuh"
#include "sm90/forward/common/maps.cuh"

namespace flash_cute::sm90::forward::masked_rows {

template <class Traits>
cudaError_t launch_kernel(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  KernelArgs args;
  args.params = params;
  cudaError_t error = encode_maps<Traits>(args);
  if (error != cudaSuccess) return error;
  constexpr int kSmemBytes = sizeof(typename Traits::SharedStorage);
  error = cudaFuncSetAttribute(fwd_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  // Early: the kernel before is the one that makes the mask's lists, for whose end this one waits.
  Launch const shape{.ctas = plan.ctas, .threads = Traits::kThreads, .smem_bytes = kSmemBytes, .early = true};
  return sm90::launch(fwd_kernel<Traits>, shape, args, stream);
}

template <int kHeadDim, int kHeadDimV, int kEntry>
cudaError_t launch_entry(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  return with_variant<Variant::kMasked, Variant::kMaskedModified>(plan.variant, [&]<Variant kVariant>() {
    return with_element(plan.dtype, [&]<class Element>(Element) {
      constexpr TileConfig kTile = tile_config(kHeadDim, kHeadDimV, kEntry);
      return launch_kernel<Traits<Element, kHeadDim, kTile, kVariant, kHeadDimV>>(plan, params, stream);
    });
  });
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  if constexpr (has_entry(kHeadDim, kHeadDimV, kOfBlocks)) {
    if (plan.entry == kOfBlocks) return launch_entry<kHeadDim, kHeadDimV, kOfBlocks>(plan, params, stream);
  }
  return launch_entry<kHeadDim, kHeadDimV, kAnyMask>(plan, params, stream);
}

}  // namespace flash_cute::sm90::forward::masked_rows
