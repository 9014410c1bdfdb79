// Launches a plan. Included only by the generated instance files.
#pragma once

#include "sm90/forward/pair/launch.cuh"
#include "kernel.cuh"

namespace flash_cute::sm90::forward::pair_by_turns {

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV);
  auto const kernel_of = []<class KernelTraits>(KernelTraits) { return fwd_pair_by_turns_kernel<KernelTraits>; };
  return pair::launch_plan<Traits, kHeadDim>(kernel_of, plan, params, stream);
}

}  // namespace flash_cute::sm90::forward::pair_by_turns
