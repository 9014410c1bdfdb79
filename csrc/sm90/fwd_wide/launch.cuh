// Launches a plan. Included only by the generated instance files.
#pragma once

#include "../large/launch.cuh"
#include "kernel.cuh"

namespace flash_cute::sm90::fwd_wide {

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV);
  auto const kernel_of = []<class KernelTraits>(KernelTraits) { return fwd_wide_kernel<KernelTraits>; };
  return large::launch_plan<Traits, kHeadDim>(kernel_of, plan, params, stream);
}

}  // namespace flash_cute::sm90::fwd_wide
