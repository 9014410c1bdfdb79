// Launches a plan: the lists of the sequences' tiles, the preprocess, dK and dV, dQ. Included only by the generated
// instance files.
#pragma once

#include <cuda_runtime.h>

#include "core/bwd_preprocess_large.cuh"
#include "core/element.cuh"
#include "core/with_variant.cuh"
#include "core/list_sequence_tiles.cuh"
#include "sm90/backward/common/encode_maps.cuh"
#include "sm90/common/launch.cuh"
#include "keys.cuh"
#include "queries.cuh"
#include "side_kernels.cuh"

namespace flash_cute::sm90::backward::dq_in_registers_large {

template <class Traits>
cudaError_t launch_kernels(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  KernelArgs args{};
  args.params = with_scaled_dout(params);
  backward::MapBoxes const boxes{.query_rows = kTileRows, .key_rows = kTileRows, .columns = Traits::kChunk};
  cudaError_t error = backward::encode_maps<typename Traits::Element, Traits::kVariant>(args, boxes);
  if (error != cudaSuccess) return error;
  for (auto* const kernel : {bwd_keys_kernel<Traits>, bwd_queries_kernel<Traits>}) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
    if (error != cudaSuccess) return error;
  }
  error = launch_sequence_tiles<kTileRows, kTileRows>(params, stream);
  if (error != cudaSuccess) return error;
  error = launch_bwd_preprocess_large<typename Traits::Element, kTileRows>(plan, params, stream);
  if (error != cudaSuccess) return error;
  Launch shape{
      .ctas = plan.ctas, .threads = Traits::kThreads, .smem_bytes = Traits::kSmemBytes, .cluster_ctas = Traits::kCtas};
  error = sm90::launch(bwd_keys_kernel<Traits>, shape, args, stream);
  if (error != cudaSuccess) return error;
  shape.ctas = plan.dq_ctas;
  return sm90::launch(bwd_queries_kernel<Traits>, shape, args, stream);
}

template <class Element, int kHeadDim, Variant kVariant>
using TraitsOf = std::conditional_t<has_sides(kHeadDim), SideTraits<Element, kHeadDim, kVariant>,
                                    Traits<Element, kHeadDim, kVariant>>;

template <int kHeadDim, Variant kVariant>
cudaError_t launch_variant(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  return with_element(plan.dtype, [&]<class Element>(Element) {
    return launch_kernels<TraitsOf<Element, kHeadDim, kVariant>>(plan, params, stream);
  });
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV);
  return with_variant<Variant::kPacked, Variant::kModified>(
      plan.variant, [&]<Variant kVariant>() { return launch_variant<kHeadDim, kVariant>(plan, params, stream); });
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
