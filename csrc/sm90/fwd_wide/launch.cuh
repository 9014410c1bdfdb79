// Launches a plan. Included only by the generated instance files.
#pragma once

#include "../../core/element.cuh"
#include "../large/launch.cuh"
#include "kernel.cuh"

namespace flash_cute::sm90::fwd_wide {

template <int kHeadDim, Variant kVariant>
cudaError_t launch_variant(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  return with_element(plan.dtype, [&]<class Element>(Element) {
    using KernelTraits = Traits<Element, kHeadDim, kVariant>;
    return large::launch<KernelTraits>(fwd_wide_kernel<KernelTraits>, plan, params, stream);
  });
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV);
  switch (plan.variant) {
    case Variant::kPacked: return launch_variant<kHeadDim, Variant::kPacked>(plan, params, stream);
    case Variant::kModified: return launch_variant<kHeadDim, Variant::kModified>(plan, params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash_cute::sm90::fwd_wide
