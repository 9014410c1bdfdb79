// Launches a plan: the preprocess and the backward. Included only by the generated instance files.
#pragma once

#include "core/element.cuh"
#include "core/with_variant.cuh"
#include "sm90/backward/common/encode_maps.cuh"
#include "sm90/backward/common/launch_preparation.cuh"
#include "kernel.cuh"
#include "mla_traits.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

template <class Traits>
cudaError_t launch_kernels(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  KernelArgs args{};
  args.params = with_scaled_dout(params);
  MapBoxes const boxes{.query_rows = Traits::kBlockM,
                       .key_rows = Traits::kBlockN,
                       .columns = Traits::kChunk,
                       .columns_of_k = Traits::ColumnsK::kChunk};
  cudaError_t error = encode_maps<typename Traits::Element, Traits::kVariant>(args, boxes);
  if (error != cudaSuccess) return error;
  constexpr int kSmemBytes = sizeof(typename Traits::SharedStorage);
  error = cudaFuncSetAttribute(bwd_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  error = launch_preparation<Traits, Traits::kBlockM, Traits::kBlockN>(plan, params, stream);
  if (error != cudaSuccess) return error;
  bwd_kernel<Traits><<<unsigned(plan.ctas), Traits::kThreads, kSmemBytes, stream>>>(args);
  return cudaGetLastError();
}

template <class Element, int kHeadDim, int kHeadDimV, Variant kVariant>
using TraitsOf = std::conditional_t<is_mla(kHeadDim, kHeadDimV),
                                    MlaTraits<Element, kHeadDim, tile_config(kHeadDim, kVariant), kVariant, kHeadDimV>,
                                    Traits<Element, kHeadDim, tile_config(kHeadDim, kVariant), kVariant>>;

template <int kHeadDim, int kHeadDimV, Variant kVariant>
cudaError_t launch_variant(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  return with_element(plan.dtype, [&]<class Element>(Element) {
    if constexpr (has_kernel(kHeadDim, kHeadDimV, kVariant, std::is_same_v<Element, cutlass::bfloat16_t>)) {
      return launch_kernels<TraitsOf<Element, kHeadDim, kHeadDimV, kVariant>>(plan, params, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  static_assert(kHeadDimV == kHeadDim || is_mla(kHeadDim, kHeadDimV));
  return with_variant<Variant::kDense, Variant::kPacked, Variant::kModified, Variant::kDenseModified,
                      Variant::kMasked, Variant::kMaskedModified>(
      plan.variant,
      [&]<Variant kVariant>() { return launch_variant<kHeadDim, kHeadDimV, kVariant>(plan, params, stream); });
}

}  // namespace flash_cute::sm90::backward::dq_in_memory
