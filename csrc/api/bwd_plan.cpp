// The plan of a backward as JSON.
#include "bwd.h"
#include "plan_json.h"

namespace flash_cute {
namespace {

std::vector<NamedCopy> tensors(BwdDecision const& decision) {
  int const head_dim = decision.padded_head_dim, head_dim_v = decision.padded_head_dim_v;
  return {{"q", decision.q, Access::kRead, head_dim},
          {"k", decision.k, Access::kRead, head_dim},
          {"v", decision.v, Access::kRead, head_dim_v},
          {"out", decision.out, Access::kRead, head_dim_v},
          {"dout", decision.dout, Access::kRead, head_dim_v},
          {"dq", decision.dq, Access::kWritten, head_dim},
          {"dk", decision.dk, Access::kWritten, head_dim},
          {"dv", decision.dv, Access::kWritten, head_dim_v}};
}

std::string why_tile(Problem const& problem, BwdDecision const& decision) {
  KernelShape const& shape = decision.plan.shape;
  return "Tile of " + std::to_string(shape.block_n) + " keys by " + std::to_string(shape.block_m) + " query rows: " +
         table_entry(decision) +
         decision.instance->family->why_tile(decision.plan, seen_by_kernels(problem), decision.gpu) + ".";
}

std::vector<std::string> reasons(Problem const& problem, BwdDecision const& decision) {
  std::vector<std::string> sentences{why_backend(problem, decision, "backward"), why_tile(problem, decision)};
  if (decision.plan.variant.reads_sequences && problem.packed) {
    sentences.push_back("The lengths are read on the device: of the workspace, " +
                        std::to_string(decision.plan.workspace.bytes >> 20) +
                        " MB, only the part for the tiles that exist is touched.");
  }
  add_mask_reason(sentences, problem);
  if (BwdPlan const& plan = decision.plan; plan.parts > 1) {
    sentences.push_back("The sequences are short: they are processed " + std::to_string(plan.sequences_per_part) +
                        " at a time, in " + std::to_string(plan.parts) +
                        " launches, so that the workspace is not larger than it need be.");
  }
  add_tuning_reason(sentences, decision);
  add_tensor_reasons(sentences, problem, decision, tensors(decision));
  if (decision.plan.workspace.bytes == 0) {
    sentences.push_back("Nothing is launched: there is no row or no key, and every gradient is 0.");
    return sentences;
  }
  if (problem.heads_q > problem.heads_kv) {
    sentences.push_back("A CTA loops over the " + std::to_string(problem.heads_q / problem.heads_kv) +
                        " query heads of its key head, so that dk and dv are summed in registers.");
  }
  if (TileSplit const& split = decision.plan.split; split.tiles > 0) {
    sentences.push_back("Of the key tiles " + std::to_string(split.tiles) +
                        " fill no whole wave: their rows are split over " + std::to_string(split.ranges) +
                        " multiprocessors.");
  }
  if (decision.plan.scales_dout) {
    sentences.push_back("Since a gradient of the LSE is divided by the keys' share of the weights, each row of dout is "
                        "scaled by a power of two, in the workspace.");
  }
  for (std::string const& note : decision.instance->family->notes(decision.plan, problem)) sentences.push_back(note);
  if (decision.plan.dq_kernel != nullptr) {
    sentences.push_back(std::string("Deterministic in either mode: dq has a kernel of its own, ") +
                        decision.plan.dq_kernel + ", and every sum is in registers.");
    return sentences;
  }
  sentences.push_back(decision.plan.deterministic
                          ? "Deterministic: the key tiles of a row tile add to dq in one order."
                          : "Not deterministic: the sums of dq have the order in which key tiles are done; dk and dv "
                            "have the same bits in every run.");
  return sentences;
}

}  // namespace

JsonObject bwd_plan_object(FwdArgs const& call, PlannedCall const& planned) {
  auto const& [problem, gpu] = planned;
  if (!gpu) {
    JsonObject json = call_json("cpu", call, problem);
    json.boolean("deterministic", true)
        .boolean("dlse", problem.has_dlse)
        .raw("copies", copies_json(tensors({}), problem))
        .raw("reasons", json_list(cpu_reasons(problem)));
    return json;
  }
  BwdDecision const decision = plan_bwd(call, nullptr, nullptr, problem, *gpu);
  JsonObject json = call_json(backend_name(decision.backend()), call, problem);
  add_kernel(json, decision, decision.plan.key_tiles);
  json.number("kernel_head_dim_v", int64_t{decision.plan.head_dim_v})
      .string("variant", variant_name(decision.plan.variant))
      .boolean("deterministic", problem.deterministic)
      .boolean("dlse", problem.has_dlse)
      .number("split_tiles", int64_t{decision.plan.split.tiles})
      .number("split_ctas", int64_t{decision.plan.split.ranges})
      .number("workspace_bytes", decision.plan.workspace.bytes);
  add_tuning(json, problem, decision, tuning_key(/*backward=*/true, call, problem, *gpu));
  json.raw("copies", copies_json(tensors(decision), problem))
      .raw("reasons", json_list(reasons(problem, decision)));
  return json;
}

std::string bwd_plan_json(FwdArgs const& call, bool deterministic, bool has_dlse, int64_t capability) {
  PlannedCall planned = check_planned(call, capability);
  planned.problem.deterministic = deterministic;
  planned.problem.has_dlse = has_dlse;
  return bwd_plan_object(call, planned).text();
}

}  // namespace flash_cute
