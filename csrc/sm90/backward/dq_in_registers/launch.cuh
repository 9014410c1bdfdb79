// Launches a plan: the preprocess, dK and dV, dQ. Included only by the generated instance files.
#pragma once

#include "core/element.cuh"
#include "core/with_variant.cuh"
#include "sm90/backward/common/encode_maps.cuh"
#include "sm90/backward/common/launch_preparation.cuh"
#include "keys.cuh"
#include "queries.cuh"

namespace flash_cute::sm90::backward::dq_in_registers {

template <class Traits>
cudaError_t launch_kernels(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  KernelArgs args{};
  args.params = with_scaled_dout(params);
  backward::MapBoxes const boxes{.query_rows = kRows, .key_rows = kKeys, .columns = Traits::kChunk};
  cudaError_t error = backward::encode_maps<typename Traits::Element, Traits::kVariant>(args, boxes);
  if (error != cudaSuccess) return error;
  constexpr int kSmemBytes = smem_bytes(Traits::kHeadDim, Traits::kHeadDimV);
  for (auto* const kernel : {bwd_keys_kernel<Traits>, bwd_queries_kernel<Traits>}) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
    if (error != cudaSuccess) return error;
  }
  constexpr int kTileRows = Traits::kVariant.reads_sequences ? Traits::kListedRows : kRows;
  error = backward::launch_preparation<Traits, kTileRows, kKeys>(plan, params, stream);
  if (error != cudaSuccess) return error;
  bwd_keys_kernel<Traits><<<unsigned(plan.ctas), Traits::kThreads, kSmemBytes, stream>>>(args);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  bwd_queries_kernel<Traits><<<unsigned(plan.dq_ctas), Traits::kThreads, kSmemBytes, stream>>>(args);
  return cudaGetLastError();
}

template <int kHeadDim, int kHeadDimV, Variant kVariant>
cudaError_t launch_variant(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  return with_element(plan.dtype, [&]<class Element>(Element) {
    if constexpr (has_kernel(kHeadDim, kHeadDimV, kVariant, std::is_same_v<Element, cutlass::bfloat16_t>)) {
      return launch_kernels<Traits<Element, kHeadDim, kHeadDimV, kVariant>>(plan, params, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  return with_variant<Variant::kDense, Variant::kPacked, Variant::kModified, Variant::kDenseModified,
                      Variant::kMasked, Variant::kMaskedModified>(
      plan.variant,
      [&]<Variant kVariant>() { return launch_variant<kHeadDim, kHeadDimV, kVariant>(plan, params, stream); });
}

}  // namespace flash_cute::sm90::backward::dq_in_registers
