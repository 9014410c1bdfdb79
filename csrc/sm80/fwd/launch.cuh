// From a plan to a launch. Included only by the generated instance files.
#pragma once

#include <climits>

#include "kernel.cuh"

namespace flash_cute::sm80::fwd {

template <class Traits>
cudaError_t launch_kernel(FwdParams const& params, cudaStream_t stream) {
  auto const scheduler =
      TileScheduler::make(params, Traits::kBlockM, std::is_same_v<typename Traits::Mask, CausalMask>);
  if (scheduler.num_tiles() > INT_MAX) return cudaErrorInvalidConfiguration;

  constexpr int kSmemBytes = sizeof(typename Traits::SharedStorage);
  if constexpr (kSmemBytes > 48 * 1024) {
    cudaError_t const error =
        cudaFuncSetAttribute(fwd_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
    if (error != cudaSuccess) return error;
  }
  fwd_kernel<Traits><<<unsigned(scheduler.num_tiles()), Traits::kThreads, kSmemBytes, stream>>>(params, scheduler);
  return cudaGetLastError();
}

template <int kHeadDim, class Variant, int kChip>
cudaError_t launch_on(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  constexpr bool kCausal = std::is_same_v<typename Variant::Mask, CausalMask>;
  constexpr TileConfig kTile = tile_config(kHeadDim, kCausal, kChip);
  return plan.dtype == DType::kFloat16
             ? launch_kernel<Traits<cutlass::half_t, kHeadDim, Variant, kTile>>(params, stream)
             : launch_kernel<Traits<cutlass::bfloat16_t, kHeadDim, Variant, kTile>>(params, stream);
}

template <int kHeadDim, class Variant>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  switch (plan.config) {
    case kA100: return launch_on<kHeadDim, Variant, kA100>(plan, params, stream);
    case kSmem99K: return launch_on<kHeadDim, Variant, kSmem99K>(plan, params, stream);
    case kH100: return launch_on<kHeadDim, Variant, kH100>(plan, params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash_cute::sm80::fwd
