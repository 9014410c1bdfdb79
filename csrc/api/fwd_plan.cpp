// The plan of a forward as JSON.
#include "fwd.h"
#include "plan_json.h"
#include "sm90/fwd_wide/tile.h"

namespace flash_cute {
namespace {

std::vector<NamedCopy> tensors(FwdDecision const& decision) {
  int const head_dim = decision.padded_head_dim, head_dim_v = decision.padded_head_dim_v;
  return {{"q", decision.q, Access::kRead, head_dim},
          {"k", decision.k, Access::kRead, head_dim},
          {"v", decision.v, Access::kRead, head_dim_v},
          {"out", decision.out, Access::kWritten, head_dim_v}};
}

// `tiles`: those of all heads; of packed sequences the most that there can be.
std::string why_tile(Problem const& problem, FwdDecision const& decision, int64_t tiles, bool packed) {
  KernelShape const& shape = decision.plan.shape;
  std::string text = "Tile of " + std::to_string(shape.block_m) + " query rows by " + std::to_string(shape.block_n) +
                     " keys: " + table_entry(decision);
  if (problem.accumulate != Accumulate::kFloat32) {
    text += " of the kernels that accumulate in float16";
  } else if (decision.backend == Backend::kSm80) {
    text += sm80_chip_text(decision.plan.entry);
  } else {
    text += std::string(", with ") + (packed ? "at most " : "") + std::to_string(tiles) + " tiles for " +
            std::to_string(decision.gpu.num_sms) + " multiprocessors";
  }
  if (problem.len_k == 0) text += " (there are no keys: out is 0, lse -inf)";
  return text + ".";
}

std::vector<std::string> reasons(Problem const& problem, FwdDecision const& decision, int64_t tiles, bool packed) {
  std::vector<std::string> sentences{why_backend(problem, decision, "forward"),
                                     why_tile(problem, decision, tiles, packed)};
  if (has_float16_qk(problem.accumulate)) {
    sentences.push_back("Q K^T is summed in float16: scores err more, and saturate at 65504 times a power of two.");
  }
  if (has_float16_pv(problem.accumulate)) {
    sentences.push_back("P V is summed in float16 within a key tile, and over the key tiles in float32.");
  }
  if (packed) sentences.push_back("The lengths are read on the device, which finds the tiles that there are.");
  if (decision.plan.draws_tiles) {
    sentences.push_back("The longest tiles come first, and a CTA that is done draws the next from a counter.");
  }
  if (TileSplit const& split = decision.plan.split; split.tiles > 0) {
    sentences.push_back("Of them " + std::to_string(split.tiles) + " fill no whole wave: their keys are split over " +
                        std::to_string(split.ranges) + " multiprocessors, by " +
                        std::to_string(decision.plan.workspace.bytes / 1024) + " KB of workspace.");
  }
  if (int const parts = decision.plan.column_parts; parts > 1) {
    sentences.push_back("The columns of out are split over " + std::to_string(parts) +
                        " CTAs per row tile, " +
                        (decision.backend == Backend::kSm90 ? "which also divide the work on its scores."
                         : decision.plan.pairs_ctas
                             ? "each of which computes the scores of every second key tile, and sends P to the "
                               "other one."
                             : "each of which computes the scores of its rows."));
  }
  add_tuning_reason(sentences, decision);
  add_tensor_reasons(sentences, problem, decision, tensors(decision));
  if (decision.plan.ctas == 0) sentences.push_back("Nothing is launched: the output is empty.");
  if (problem.heads_kv > 0 && problem.heads_q > problem.heads_kv) {
    sentences.push_back("Every " + std::to_string(problem.heads_q / problem.heads_kv) +
                        " query heads read one head of k and v in place.");
  }
  return sentences;
}

char const* kernel_name(FwdDecision const& decision) {
  if (!is_large(decision)) return "fwd_kernel";
  if (decision.plan.pairs_ctas) return "fwd_large_pair_kernel";
  bool const wide =
      decision.backend == Backend::kSm90 && decision.plan.head_dim <= sm90::fwd_wide::kMaxHeadDim;
  return wide ? "fwd_wide_kernel" : "fwd_large_kernel";
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
  bool const packed = args.sequences.has_value();
  int64_t const tiles = most_row_tiles(problem, plan.shape, packed);
  JsonObject json = call_json(backend_name(decision.backend), args, problem);
  add_kernel(json, kernel_name(decision), decision, tiles);
  json.number("kernel_head_dim_v", int64_t{plan.head_dim_v})
      .number("column_parts", int64_t{std::max(1, plan.column_parts)})
      .string("variant", variant_name(plan.variant))
      .string("accumulate", kAccumulateNames[static_cast<int>(plan.accumulate)]);
  if (decision.backend == Backend::kSm90 && !is_large(decision)) {
    json.boolean("late_wait", sm90::fwd::tile_config(plan.head_dim, plan.entry, plan.head_dim_v).late_wait);
  }
  json.number("split_tiles", int64_t{decision.plan.split.tiles})
      .number("split_ctas", int64_t{decision.plan.split.ranges})
      .number("workspace_bytes", decision.plan.workspace.bytes);
  add_tuning(json, decision, tuning_key(/*backward=*/false, args, problem, /*deterministic=*/false, *gpu));
  json.raw("copies", copies_json(tensors(decision), problem))
      .raw("reasons", json_list(reasons(problem, decision, tiles, packed)));
  return json;
}

std::string fwd_plan_json(FwdArgs const& args, int64_t capability) {
  return fwd_plan_object(args, check_planned(args, capability)).text();
}

}  // namespace flash_cute
