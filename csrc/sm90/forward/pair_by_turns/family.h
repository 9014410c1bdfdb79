// The plan of this folder's kernels.
#pragma once

#include "sm90/forward/pair/family.h"
#include "tile.h"

namespace flash_cute::sm90::forward::pair_by_turns {

struct Family : pair::TwoCtaFamily {
  static constexpr char const* kName = "sm90::forward::pair_by_turns";

  static void plan(FwdPlan& plan, Problem const& problem, Choice const&, Gpu gpu) {
    plan.kernel = "fwd_pair_by_turns_kernel";
    plan.shape = kernel_shape();
    plan_pairs(plan, problem, gpu);
  }
};
static_assert(kCtas == 2);

}  // namespace flash_cute::sm90::forward::pair_by_turns
