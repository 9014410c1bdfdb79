// The forward as the operators call it.
#pragma once

#include "planner.h"

namespace flash_cute {

struct FwdResult {
  Tensor out;  // (batch, heads_q, len_q, head_dim_v), laid out like empty_like(q), see out_strides
  Tensor lse;  // (batch, heads_q, len_q), float32, contiguous
};

struct VarlenArgs;

// CUDA tensors, on the current stream of their device. `lengths`: of packed tensors, whose result is packed too.
FwdResult fwd_cuda(FwdArgs const& args);
FwdResult packed_fwd_cuda(FwdArgs const& args, Problem const& problem, VarlenArgs const& lengths);

// The plan as JSON. `capability` 0: that of the tensors' own device.
std::string fwd_plan_json(FwdArgs const& args, int64_t capability);

}  // namespace flash_cute
