// Launches a plan. Included only by the generated instance files.
#pragma once

#include "core/element.cuh"
#include "sm80/decode/common/launch.cuh"
#include "kernel.cuh"

namespace flash_cute::sm80::decode::streamed {

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(DecodePlan const& plan, DecodeParams const& params, cudaStream_t stream) {
  return with_element(plan.dtype, [&]<class Element>(Element) {
    using KernelTraits = Traits<Element, kHeadDim, kHeadDimV>;
    int const slab_bytes = plan.shape.smem_bytes - kFixedBytes;
    return launch_plan<KernelTraits>(decode_kernel<KernelTraits>, plan, params, stream, slab_bytes);
  });
}

}  // namespace flash_cute::sm80::decode::streamed
