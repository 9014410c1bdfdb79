// The plan of a backward as JSON.
#include "bwd.h"
#include "plan_json.h"
#include "sm80/bwd/tile.h"
#include "sm80/large/tile.h"
#include "sm90/bwd_large/tile.h"

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

// The kernel that computes dK and dV.
char const* kernel_name(BwdDecision const& decision) {
  if (decision.plan.key_pairs > 0) return "bwd_keys_pair_kernel";
  if (decision.plan.shape.dq_in_registers) return "bwd_keys_kernel";
  bool const sequences = decision.backend == Backend::kSm80 && reads_sequences(decision.plan.variant);
  return sequences ? "bwd_sequences_kernel" : "bwd_kernel";
}

std::string why_tile(BwdDecision const& decision) {
  KernelShape const& shape = decision.plan.shape;
  std::string text = "Tile of " + std::to_string(shape.block_n) + " keys by " + std::to_string(shape.block_m) +
                     " query rows: " + table_entry(decision);
  if (decision.backend == Backend::kSm90) return text + ".";
  BwdPlan const& plan = decision.plan;
  bool const plain =
      plan.variant == Variant::kPacked && sm80::bwd::has_plain_sequence_kernel(plan.head_dim, plan.entry);
  if (!is_large(decision) && reads_sequences(plan.variant) && !plain) {
    return text + " for packed batches and modified scores, on any chip.";
  }
  return text + sm80_chip_text(plan.entry) + ".";
}

// Of the kernels for large head dims.
std::string column_parts_text(BwdDecision const& decision) {
  bool const pairs = decision.plan.key_pairs > 0;
  std::string const workspace = "the workspace, " +
                                std::to_string((decision.plan.workspace.bytes + 1023) / 1024) +
                                " KB, holds two statistics per row" +
                                (pairs ? ", the lists of tiles and the CTAs' messages." : " and the lists of tiles.");
  if (decision.backend == Backend::kSm90) {
    int const head_dim = decision.plan.head_dim;
    int const ctas = sm90::bwd_large::ctas_per_tile(head_dim);
    if (ctas == 1) return "A tile has one CTA, with all columns; " + workspace;
    return "A tile has a cluster of " + std::to_string(ctas) +
           " CTAs, half of them for q and k and half for dout and v, with " +
           std::to_string(sm90::bwd_large::columns_per_cta(head_dim)) + " columns each; " + workspace;
  }
  int const parts = sm80::large::column_parts(decision.padded_head_dim);
  int const parts_of_dv = sm80::large::column_parts(decision.padded_head_dim_v);
  std::string const text = std::to_string(parts);
  return "The columns of dk, dv and dq are split over " + text + ", " + std::to_string(parts_of_dv) + " and " + text +
         " CTAs per tile" +
         (pairs ? ": where there are two, each computes P or dS of every second tile, and sends it to the other one; "
                : ", each of which computes the scores of its keys or rows; ") +
         workspace;
}

std::vector<std::string> reasons(Problem const& problem, BwdDecision const& decision, bool packed) {
  std::vector<std::string> sentences{why_backend(problem, decision, "backward"), why_tile(decision)};
  if (packed) {
    sentences.push_back("The lengths are read on the device: of the workspace, " +
                        std::to_string(decision.plan.workspace.bytes >> 20) +
                        " MB, only the part for the tiles that exist is touched.");
  }
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
  if (is_large(decision)) sentences.push_back(column_parts_text(decision));
  if (decision.plan.shape.dq_in_registers) {
    sentences.push_back(std::string("Deterministic in either mode: dq has a kernel of its own, ") +
                        (decision.plan.row_pairs > 0 ? "bwd_queries_pair_kernel" : "bwd_queries_kernel") +
                        ", and every sum is in registers.");
    return sentences;
  }
  sentences.push_back(decision.plan.deterministic
                          ? "Deterministic: the key tiles of a row tile add to dq in one order."
                          : "Not deterministic: the sums of dq have the order in which key tiles are done; dk and dv "
                            "have the same bits in every run.");
  return sentences;
}

}  // namespace

JsonObject bwd_plan_object(FwdArgs const& call, bool deterministic, bool has_dlse, PlannedCall const& planned) {
  auto const& [problem, gpu] = planned;
  if (!gpu) {
    JsonObject json = call_json("cpu", call, problem);
    json.boolean("deterministic", true)
        .boolean("dlse", has_dlse)
        .raw("copies", copies_json(tensors({}), problem))
        .raw("reasons", json_list(cpu_reasons(problem)));
    return json;
  }
  BwdDecision const decision = plan_bwd(call, nullptr, nullptr, deterministic, has_dlse, problem, *gpu);
  JsonObject json = call_json(backend_name(decision.backend), call, problem);
  add_kernel(json, kernel_name(decision), decision, decision.plan.key_tiles);
  json.number("kernel_head_dim_v", int64_t{decision.plan.head_dim_v})
      .string("variant", variant_name(decision.plan.variant))
      .boolean("deterministic", deterministic)
      .boolean("dlse", has_dlse)
      .number("split_tiles", int64_t{decision.plan.split.tiles})
      .number("split_ctas", int64_t{decision.plan.split.ranges})
      .number("workspace_bytes", decision.plan.workspace.bytes);
  add_tuning(json, decision, tuning_key(/*backward=*/true, call, problem, deterministic, *gpu));
  json.raw("copies", copies_json(tensors(decision), problem))
      .raw("reasons", json_list(reasons(problem, decision, call.sequences.has_value())));
  return json;
}

std::string bwd_plan_json(FwdArgs const& call, bool deterministic, bool has_dlse, int64_t capability) {
  return bwd_plan_object(call, deterministic, has_dlse, check_planned(call, capability)).text();
}

}  // namespace flash_cute
