// The plan of a forward as JSON.
#include "fwd.h"
#include "plan_json.h"
#include "planning/tiles.h"

namespace flash_cute {
namespace {

std::vector<NamedCopy> tensors(FwdDecision const& decision) {
  int const head_dim = decision.padded_head_dim, head_dim_v = decision.padded_head_dim_v;
  return {{"q", decision.q, Access::kRead, head_dim},
          {"k", decision.k, Access::kRead, head_dim},
          {"v", decision.v, Access::kRead, head_dim_v},
          {"out", decision.out, Access::kWritten, head_dim_v}};
}

std::string why_tile(Problem const& problem, FwdDecision const& decision) {
  KernelShape const& shape = decision.plan.shape;
  std::string const empty = problem.len_k == 0 ? " (there are no keys: out is 0, lse -inf)" : "";
  return "Tile of " + std::to_string(shape.block_m) + " query rows by " + std::to_string(shape.block_n) + " keys: " +
         table_entry(decision) +
         decision.instance->family->why_tile(decision.plan, seen_by_kernels(problem), decision.gpu) +
         empty + ".";
}

std::vector<std::string> reasons(Problem const& problem, FwdDecision const& decision) {
  std::vector<std::string> sentences{why_backend(problem, decision, "forward"), why_tile(problem, decision)};
  if (has_float16_qk(problem.accumulate)) {
    sentences.push_back("Q K^T is summed in float16: scores err more, and saturate at 65504 times a power of two.");
  }
  if (has_float16_pv(problem.accumulate)) {
    sentences.push_back("P V is summed in float16 within a key tile, and over the key tiles in float32.");
  }
  if (decision.plan.variant.reads_sequences && problem.packed) {
    sentences.push_back("The lengths are read on the device, which finds the tiles that there are.");
  }
  add_mask_reason(sentences, problem);
  if (decision.plan.draws_tiles) {
    sentences.push_back("The longest tiles come first, and a CTA that is done draws the next from a counter.");
  }
  if (TileSplit const& split = decision.plan.split; split.tiles > 0) {
    sentences.push_back("Of them " + std::to_string(split.tiles) + " fill no whole wave: their keys are split over " +
                        std::to_string(split.ranges) + " multiprocessors, by " +
                        std::to_string(decision.plan.workspace.bytes / 1024) + " KB of workspace.");
  }
  for (std::string const& note : decision.instance->family->notes(decision.plan, problem)) sentences.push_back(note);
  add_tuning_reason(sentences, decision);
  add_tensor_reasons(sentences, problem, decision, tensors(decision));
  if (decision.plan.ctas == 0) sentences.push_back("Nothing is launched: the output is empty.");
  if (problem.heads_kv > 0 && problem.heads_q > problem.heads_kv) {
    sentences.push_back("Every " + std::to_string(problem.heads_q / problem.heads_kv) +
                        " query heads read one head of k and v in place.");
  }
  return sentences;
}

}  // namespace

JsonObject fwd_plan_object(FwdArgs const& args, PlannedCall const& call) {
  auto const& [problem, gpu] = call;
  if (!gpu) {
    JsonObject json = call_json("cpu", args, problem);
    json.raw("copies", copies_json(tensors({}), problem)).raw("reasons", json_list(cpu_reasons(problem)));
    return json;
  }
  FwdDecision const decision = plan_fwd(args, problem, *gpu);
  FwdPlan const& plan = decision.plan;
  JsonObject json = call_json(backend_name(decision.backend()), args, problem);
  add_kernel(json, decision, most_row_tiles(seen_by_kernels(problem), plan.shape.block_m));
  json.number("kernel_head_dim_v", int64_t{plan.head_dim_v})
      .number("column_parts", int64_t{std::max(1, plan.column_parts)})
      .string("variant", variant_name(plan.variant))
      .string("accumulate", kAccumulateNames[static_cast<int>(plan.accumulate)])
      .number("split_tiles", int64_t{plan.split.tiles})
      .number("split_ctas", int64_t{plan.split.ranges})
      .number("workspace_bytes", plan.workspace.bytes);
  add_tuning(json, problem, decision, tuning_key(/*backward=*/false, args, problem, *gpu));
  json.raw("copies", copies_json(tensors(decision), problem)).raw("reasons", json_list(reasons(problem, decision)));
  return json;
}

std::string fwd_plan_json(FwdArgs const& args, int64_t capability) {
  return fwd_plan_object(args, check_planned(args, capability)).text();
}

}  // namespace flash_cute
