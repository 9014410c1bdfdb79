// Packed sequences: check, then launch or plan.
#include "varlen.h"

#include "plan_json.h"
#include "served.h"

namespace flash_cute {
namespace {

void check_lengths_tensor(TensorInfo const& q, TensorInfo const& tensor) {
  check_same_device(q, tensor);
  FLASH_CUTE_CHECK(tensor.dtype == aoti_torch_dtype_int32(), tensor.name, ": expected int32, got ",
                   dtype_name(tensor.dtype));
}

void check_contiguous(TensorInfo const& tensor) {
  FLASH_CUTE_CHECK(tensor.sizes[0] <= 1 || tensor.strides[0] == 1, tensor.name,
                   ": expected a contiguous tensor, got a stride of ", tensor.strides[0]);
}

void check_offsets(TensorInfo const& q, TensorInfo const& offsets) {
  check_lengths_tensor(q, offsets);
  FLASH_CUTE_CHECK(offsets.rank == 1 && offsets.sizes[0] >= 1 && offsets.sizes[0] <= INT_MAX, offsets.name,
                   ": expected the shape (sequences + 1,), got ", shape_text(offsets));
  check_contiguous(offsets);
}

void check_used(TensorInfo const& q, TensorInfo const& used, int64_t sequences) {
  check_lengths_tensor(q, used);
  FLASH_CUTE_CHECK(used.rank == 1 && used.sizes[0] == sequences, used.name, ": expected the shape (", sequences,
                   ",), a number per sequence, got ", shape_text(used));
  check_contiguous(used);
}

void check_hint(char const* name, std::optional<int64_t> hint) {
  FLASH_CUTE_CHECK(!hint || *hint >= 0, name, ": expected None or a number of at least 0, got ", *hint);
}

void check_lengths(FwdArgs const& call, VarlenArgs const& lengths) {
  for (TensorInfo const* tensor : {&call.q, &call.k, &call.v}) {
    FLASH_CUTE_CHECK(tensor->packed, tensor->name, ": expected 3 dims (rows, heads, head_dim), got ", tensor->rank,
                     ": ", shape_text(*tensor));
  }
  check_offsets(call.q, lengths.cu_seqlens_q);
  check_offsets(call.q, lengths.cu_seqlens_k);
  int64_t const offsets_q = lengths.cu_seqlens_q.sizes[0], offsets_k = lengths.cu_seqlens_k.sizes[0];
  FLASH_CUTE_CHECK(offsets_k == offsets_q, "cu_seqlens_k: expected as many offsets as cu_seqlens_q, ", offsets_q,
                   ", got ", offsets_k);
  if (lengths.seqused_q) check_used(call.q, *lengths.seqused_q, offsets_q - 1);
  if (lengths.seqused_k) check_used(call.q, *lengths.seqused_k, offsets_q - 1);
  check_hint("max_seqlen_q", lengths.max_seqlen_q);
  check_hint("max_seqlen_k", lengths.max_seqlen_k);
}

// All that CUDA calls and plans end in until the kernels have passed the tests on a GPU, which alone may run them.
[[noreturn]] void refuse_cuda(std::string const& given) {
  fail("q: expected CPU tensors, since varlen has no CUDA kernels yet, got ", given);
}

std::string hint_json(std::optional<int64_t> hint) { return hint ? std::to_string(*hint) : "null"; }

// What the plans of both directions begin with.
JsonObject plan_json(VarlenFwdArgs const& args, int64_t capability, Problem& problem) {
  auto const planned =
      check_planned(args.call, capability, [&](bool on_cuda) { return check_varlen_fwd(args, on_cuda); });
  if (planned.gpu) refuse_cuda("a plan for compute capability " + capability_text(planned.gpu->capability));
  problem = planned.problem;
  JsonObject json = call_json("cpu", args.call, problem);
  json.boolean("packed", true)
      .raw("max_seqlen_q", hint_json(args.lengths.max_seqlen_q))
      .raw("max_seqlen_k", hint_json(args.lengths.max_seqlen_k))
      .boolean("seqused_q", args.lengths.seqused_q.has_value())
      .boolean("seqused_k", args.lengths.seqused_k.has_value());
  return json;
}

}  // namespace

TensorInfo PackedView::info(TensorInfo tensor, int64_t rank) {
  if (tensor.rank != rank) return tensor;
  int64_t const* sizes = tensor.sizes;
  int64_t const* strides = tensor.strides;
  if (rank == 3) {
    sizes_ = {1, sizes[1], sizes[0], sizes[2]};
    strides_ = {sizes[1] * strides[1], strides[1], strides[0], strides[2]};  // as PyTorch's unsqueeze has the first
  } else {
    sizes_ = {1, sizes[0], sizes[1], 0};
    strides_ = {sizes[0] * strides[0], strides[0], strides[1], 0};
  }
  tensor.sizes = sizes_.data();
  tensor.strides = strides_.data();
  tensor.rank = rank + 1;
  tensor.packed = true;
  return tensor;
}

Problem check_varlen_fwd(VarlenFwdArgs const& args, bool on_cuda) {
  check_lengths(args.call, args.lengths);
  return check_fwd(args.call, on_cuda);
}

Problem check_varlen_bwd(VarlenBwdArgs const& args, bool on_cuda) {
  check_lengths(args.bwd.call, args.lengths);
  return check_bwd(args.bwd, on_cuda);
}

FwdResult varlen_fwd_cuda(VarlenFwdArgs const& args) {
  Problem const problem = check_varlen_fwd(args, /*on_cuda=*/true);
  if (!unserved_allowed()) refuse_cuda(device_name(args.call.q));
  return packed_fwd_cuda(args.call, problem, args.lengths);
}

BwdResult varlen_bwd_cuda(VarlenBwdArgs const& args) {
  check_varlen_bwd(args, /*on_cuda=*/true);
  refuse_cuda(device_name(args.bwd.call.q));
}

std::string varlen_fwd_plan_json(VarlenFwdArgs const& args, int64_t capability) {
  Problem problem;
  JsonObject json = plan_json(args, capability, problem);
  json.raw("copies", copies_json({{"q", Copy::kNone, false},
                                  {"k", Copy::kNone, false},
                                  {"v", Copy::kNone, false},
                                  {"out", Copy::kNone, true}},
                                 problem))
      .raw("reasons", json_list(cpu_reasons(problem)));
  return json.text();
}

std::string varlen_bwd_plan_json(VarlenFwdArgs const& args, bool, int64_t capability) {
  Problem problem;
  JsonObject json = plan_json(args, capability, problem);
  json.boolean("deterministic", true)
      .raw("copies", copies_json({{"q", Copy::kNone, false},
                                  {"k", Copy::kNone, false},
                                  {"v", Copy::kNone, false},
                                  {"out", Copy::kNone, false},
                                  {"dout", Copy::kNone, false},
                                  {"dq", Copy::kNone, true},
                                  {"dk", Copy::kNone, true},
                                  {"dv", Copy::kNone, true}},
                                 problem))
      .raw("reasons", json_list(cpu_reasons(problem)));
  return json.text();
}

}  // namespace flash_cute
