// Packed sequences: check, then launch or plan.
#include "varlen.h"

#include "checks_lengths.h"
#include "plan_json.h"

namespace flash_cute {
namespace {

void check_hint(char const* name, std::optional<int64_t> hint) {
  FLASH_CUTE_CHECK(!hint || *hint >= 0, name, ": expected None or a number of at least 0, got ", *hint);
}

// With a mask a packed call is one sequence of all rows and keys, which the mask and the offsets divide.
void check_lengths_with_mask(FwdArgs const& call, VarlenArgs const& lengths) {
  FLASH_CUTE_CHECK(!lengths.seqused_q, "seqused_q: expected None with a mask, got a tensor");
  FLASH_CUTE_CHECK(!lengths.seqused_k, "seqused_k: expected None with a mask, got a tensor");
  FLASH_CUTE_CHECK(!call.alibi_slopes, "alibi_slopes: expected None with packed sequences and a mask, got a tensor");
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
  if (call.mask) check_lengths_with_mask(call, lengths);
}

// The longest of a number of sequences, of `total` rows or keys. Without a hint it is taken to be twice as long as
// their mean, as of lengths that are equally likely up to the longest.
int longest_length(std::optional<int64_t> hint, int total, int sequences) {
  int64_t const mean = (int64_t{total} + sequences - 1) / sequences;
  return static_cast<int>(std::clamp<int64_t>(hint.value_or(2 * mean), mean, total));
}

// The problem, and what the hints tell of its sequences.
Problem with_hints(Problem problem, VarlenArgs const& lengths) {
  if (problem.batch == 0) return problem;
  auto const are_equal = [&](std::optional<int64_t> longest, int total) {
    return total % problem.batch == 0 && longest == total / problem.batch;
  };
  problem.equal_lengths =
      are_equal(lengths.max_seqlen_q, problem.len_q) && are_equal(lengths.max_seqlen_k, problem.len_k);
  problem.longest_q = longest_length(lengths.max_seqlen_q, problem.len_q, problem.batch);
  problem.longest_k = longest_length(lengths.max_seqlen_k, problem.len_k, problem.batch);
  return problem;
}

std::string hint_json(std::optional<int64_t> hint) { return hint ? std::to_string(*hint) : "null"; }

PlannedCall check_planned_varlen(VarlenFwdArgs const& args, int64_t capability) {
  return check_planned(args.call, capability, [&](bool on_cuda) { return check_varlen_fwd(args, on_cuda); });
}

std::string with_lengths(JsonObject json, VarlenArgs const& lengths) {
  json.boolean("packed", true)
      .raw("max_seqlen_q", hint_json(lengths.max_seqlen_q))
      .raw("max_seqlen_k", hint_json(lengths.max_seqlen_k))
      .boolean("seqused_q", lengths.seqused_q.has_value())
      .boolean("seqused_k", lengths.seqused_k.has_value());
  return json.text();
}

}  // namespace

Problem check_varlen_fwd(VarlenFwdArgs const& args, bool on_cuda) {
  check_lengths(args.call, args.lengths);
  Problem const problem = with_hints(check_fwd(args.call, on_cuda), args.lengths);
  if (args.call.fp8) {
    check_blocks_by_hint(args.call.fp8->descale_q, args.lengths.max_seqlen_q, problem.len_q);
    check_blocks_by_hint(args.call.fp8->descale_k, args.lengths.max_seqlen_k, problem.len_k);
  }
  return problem;
}

Problem check_varlen_bwd(VarlenBwdArgs const& args, bool on_cuda) {
  check_lengths(args.bwd.call, args.lengths);
  return with_hints(check_bwd(args.bwd, on_cuda), args.lengths);
}

FwdResult varlen_fwd_cuda(VarlenFwdArgs const& args) {
  return packed_fwd_cuda(args.call, check_varlen_fwd(args, /*on_cuda=*/true), args.lengths);
}

BwdResult varlen_bwd_cuda(VarlenBwdArgs const& args) {
  return packed_bwd_cuda(args.bwd, check_varlen_bwd(args, /*on_cuda=*/true), args.lengths);
}

std::string varlen_fwd_plan_json(VarlenFwdArgs const& args, int64_t capability) {
  return with_lengths(fwd_plan_object(args.call, check_planned_varlen(args, capability)), args.lengths);
}

std::string varlen_bwd_plan_json(VarlenFwdArgs const& args, bool deterministic, bool has_dlse, int64_t capability) {
  PlannedCall planned = check_planned_varlen(args, capability);
  planned.problem.deterministic = deterministic;
  planned.problem.has_dlse = has_dlse;
  return with_lengths(bwd_plan_object(args.call, planned), args.lengths);
}

}  // namespace flash_cute
