// The backward as the operators call it.
#pragma once

#include "planner.h"

namespace flash_cute {

struct BwdResult {
  Tensor dq;  // laid out like empty_like(q)
  Tensor dk;  // like empty_like(k)
  Tensor dv;  // like empty_like(v)
  Tensor dsinks;  // (heads_q,) in the sinks' dtype; without sinks (0,), float32
};

struct VarlenArgs;

// CUDA tensors, on the current stream of their device. `lengths`: of packed tensors, whose gradients are packed too.
BwdResult bwd_cuda(BwdArgs const& args);
BwdResult packed_bwd_cuda(BwdArgs const& args, Problem const& problem, VarlenArgs const& lengths);

// The plan as JSON, for dout and out laid out like the forward's out. `has_dlse`: a gradient reaches the LSE.
// `capability` 0: that of the tensors' own device.
std::string bwd_plan_json(FwdArgs const& call, bool deterministic, bool has_dlse, int64_t capability);

}  // namespace flash_cute
