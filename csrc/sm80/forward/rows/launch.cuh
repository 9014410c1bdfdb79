// Launches a plan. Included only by the generated instance files.
#pragma once

#include "core/element.cuh"
#include "core/with_variant.cuh"
#include "core/sequence_prefix.cuh"
#include "float16_products.cuh"
#include "float16_tile.h"
#include "kernel.cuh"

namespace flash_cute::sm80::forward::rows {

template <class Traits>
cudaError_t launch_kernel(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  constexpr bool kSequences = Traits::kVariant.reads_sequences;
  constexpr int kSmemBytes = sizeof(typename Traits::Storage);
  if constexpr (kSmemBytes > 48 * 1024) {
    cudaError_t const error =
        cudaFuncSetAttribute(fwd_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
    if (error != cudaSuccess) return error;
  }
  if constexpr (kSequences) {
    if (params.sequences.tiles_before != nullptr) {
      row_tile_prefix_kernel<Traits::kBlockM><<<1, sequence_prefix::kThreads, 0, stream>>>(params);
      cudaError_t const error = cudaGetLastError();
      if (error != cudaSuccess) return error;
    }
  }
  fwd_kernel<Traits><<<unsigned(plan.ctas), Traits::kThreads, kSmemBytes, stream>>>(params);
  return cudaGetLastError();
}

template <int kHeadDim, int kChip, Variant kVariant>
cudaError_t launch_kernel(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  constexpr TileConfig kTile = tile_config(kHeadDim, kChip, kVariant);
  static_assert(smem_bytes(kTile, kHeadDim) + added_bytes(kTile, kVariant) <= kMaxSmemBytes[kChip]);
  return with_element(plan.dtype, [&]<class Element>(Element) {
    return launch_kernel<Traits<Element, kHeadDim, kTile, kVariant>>(plan, params, stream);
  });
}

template <int kHeadDim, int kChip>
cudaError_t launch_entry(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  return with_variant<Variant::kDense, Variant::kPacked, Variant::kModified, Variant::kMasked,
                      Variant::kMaskedModified>(
      plan.variant, [&]<Variant kVariant>() {
        if constexpr (has_kernel(kHeadDim, kVariant)) {
          return launch_kernel<kHeadDim, kChip, kVariant>(plan, params, stream);
        }
        return cudaErrorInvalidValue;
      });
}

template <int kHeadDim, AccumulateIn kAccumulate>
cudaError_t launch_float16(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  if constexpr (kHeadDim <= float16_max_head_dim(kAccumulate)) {
    constexpr TileConfig kTile = float16_tile_config(kHeadDim);
    static_assert(smem_bytes(kTile, kHeadDim) + kSequenceBytes <= kMaxSmemBytes[kSmem99K]);
    using KernelTraits = Float16Traits<cutlass::half_t, kHeadDim, kTile, Variant::kPacked, kAccumulate>;
    return launch_kernel<KernelTraits>(plan, params, stream);
  }
  return cudaErrorInvalidValue;
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV);
  switch (plan.accumulate) {
    using enum AccumulateIn;
    case kFloat32: break;
    case kFloat16Qk: return launch_float16<kHeadDim, kFloat16Qk>(plan, params, stream);
    case kFloat16Pv: return launch_float16<kHeadDim, kFloat16Pv>(plan, params, stream);
    case kFloat16: return launch_float16<kHeadDim, kFloat16>(plan, params, stream);
  }
  switch (plan.entry) {
    case kA100: return launch_entry<kHeadDim, kA100>(plan, params, stream);
    case kSmem99K: return launch_entry<kHeadDim, kSmem99K>(plan, params, stream);
    case kH100: return launch_entry<kHeadDim, kH100>(plan, params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash_cute::sm80::forward::rows
