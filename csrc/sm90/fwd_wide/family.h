// The plan of this folder's kernels.
#pragma once

#include "../large/family.h"
#include "tile.h"

namespace flash_cute::sm90::fwd_wide {

struct Family : large::TwoCtaFamily {
  static constexpr char const* kName = "sm90::fwd_wide";

  static void plan(FwdPlan& plan, Problem const& problem, Choice const&, Gpu gpu) {
    plan.kernel = "fwd_wide_kernel";
    plan.shape = kernel_shape();
    plan_pairs(plan, problem, gpu);
  }
};
static_assert(kCtas == 2);

}  // namespace flash_cute::sm90::fwd_wide
