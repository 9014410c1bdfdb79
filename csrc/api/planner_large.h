// The plans of the kernels for head dims above 256.
#pragma once

#include "planner.h"

namespace flash_cute {

// Completes a decision whose kernel is a large one, see is_large.
void plan_fwd_large(FwdDecision& decision, FwdArgs const& args, Problem const& problem, Gpu gpu);
void plan_bwd_large(BwdDecision& decision, FwdArgs const& call, Problem const& problem, int64_t scaled_rows, Gpu gpu);

}  // namespace flash_cute
