// Packed sequences as the operators call them: checks, launches and plans.
//
// A packed tensor (rows, heads, head_dim) is seen as a batch of one, (1, heads, rows, head_dim), so that the checks,
// strides and copies of dense calls serve it. Sequence b has the rows from start_b to end_b, and uses the first of
// them:
//
//   start_b = the largest of clamp(cu_seqlens[a], 0, rows) for a <= b   end_b = start_(b + 1)
//   length_b = clamp(seqused[b], 0, end_b - start_b), or end_b - start_b
//
// Whatever the device holds there, sequences do not overlap, and nothing outside of the tensors is read or written. The
// host never reads it.
#pragma once

#include "bwd.h"
#include "fwd.h"
#include "packed_view.h"

namespace flash_cute {

struct VarlenArgs {
  TensorInfo cu_seqlens_q;  // (sequences + 1,), int32
  TensorInfo cu_seqlens_k;  // (sequences + 1,), int32
  std::optional<TensorInfo> seqused_q;  // (sequences,), int32; none: all rows
  std::optional<TensorInfo> seqused_k;
  std::optional<int64_t> max_seqlen_q;  // hints: a wrong one costs speed alone
  std::optional<int64_t> max_seqlen_k;
};

struct VarlenFwdArgs {
  FwdArgs call;  // q, k and v packed, `sequences` given
  VarlenArgs lengths;
};

struct VarlenBwdArgs {
  BwdArgs bwd;  // dout, out, lse and dlse packed too
  VarlenArgs lengths;
};

// They check the lengths' tensors, never what these hold.
Problem check_varlen_fwd(VarlenFwdArgs const& args, bool on_cuda);
Problem check_varlen_bwd(VarlenBwdArgs const& args, bool on_cuda);

// CUDA tensors, on the current stream of their device. The results are packed.
FwdResult varlen_fwd_cuda(VarlenFwdArgs const& args);
BwdResult varlen_bwd_cuda(VarlenBwdArgs const& args);

// The plans as JSON. `capability` 0: that of the tensors' own device.
std::string varlen_fwd_plan_json(VarlenFwdArgs const& args, int64_t capability);
std::string varlen_bwd_plan_json(VarlenFwdArgs const& args, bool deterministic, bool has_dlse, int64_t capability);

}  // namespace flash_cute
