// The plan of the sm80 backward for head dims above 256: a kernel for dK and dV and one for dQ, which serve every call
// and are deterministic in either mode.
#pragma once

#include "planning/backward.h"
#include "planning/family.h"
#include "sm80/common/table.h"
#include "pair.h"
#include "tile.h"

namespace flash_cute::sm80::backward::streamed {

struct Family : OneTile {
  static constexpr Backend kBackend = Backend::kSm80;
  static constexpr char const* kName = "sm80::backward::streamed";
  static constexpr bool kReadsMasks = true;

  static bool serves(HeadDims, Problem const&) { return true; }

  static Candidate choose(HeadDims, Problem const&, Choice const& asked, bool, Gpu gpu) {
    return {.choice = {.entry = entry_of(asked, chip_of(gpu.capability))}};
  }

  static void plan(BwdPlan& plan, Problem const& problem, Choice const&, Gpu gpu) {
    plan.kernel = "bwd_keys_kernel";
    plan.dq_kernel = "bwd_queries_kernel";
    plan.variant = Variant::kModified;
    plan.shape = kernel_shape(problem.padded_head_dim(), problem.padded_head_dim_v(), plan.entry);
    if (problem.has_mask()) plan.mask = {.unit_rows = kTileRows, .block_n = kTileRows, .lists_keys = true};
    lay_out(plan, problem, {.block_m = kTileRows, .head_dim_v = problem.padded_head_dim_v()});
    check_num_tiles(plan, problem, kTileRows);
    if (plan.row_tiles == 0 || plan.key_tiles == 0) return;
    plan.ctas = plan.key_tiles;
    plan.dq_ctas = plan.row_tiles;
    if (gpu.num_sms > 1) plan_pairs(plan, problem, gpu);  // a partner that did not run would be waited for in vain
  }

  static char const* tile_name(BwdPlan const& plan) { return kChipNames[plan.entry]; }

  static std::string why_tile(BwdPlan const& plan, Problem const&, Gpu) { return chip_text(plan.entry); }

  static std::vector<std::string> notes(BwdPlan const& plan, Problem const& problem) {
    bool const pairs = plan.key_pairs > 0;
    std::string const parts = std::to_string(streaming::column_parts(problem.padded_head_dim()));
    std::string const parts_of_dv = std::to_string(streaming::column_parts(problem.padded_head_dim_v()));
    return {"The columns of dk, dv and dq are split over " + parts + ", " + parts_of_dv + " and " + parts +
            " CTAs per tile" +
            (pairs ? ": where there are two, each computes P or dS of every second tile, and sends it to the other "
                     "one; "
                   : ", each of which computes the scores of its keys or rows; ") +
            "the workspace, " + std::to_string((plan.workspace.bytes + 1023) / 1024) +
            " KB, holds two statistics per row" +
            (pairs ? ", the lists of tiles and the CTAs' messages." : " and the lists of tiles.")};
  }

 private:
  // Pairs of CTAs, where a gradient's columns are in two parts, and what they share.
  static void plan_pairs(BwdPlan& plan, Problem const& problem, Gpu gpu) {
    int const parts = streaming::column_parts(problem.padded_head_dim());
    int const parts_of_dv = streaming::column_parts(problem.padded_head_dim_v());
    auto const pairs = [&](int64_t units) { return static_cast<int>(std::min<int64_t>(units, gpu.num_sms / 2)); };
    if (std::max(parts, parts_of_dv) == 2) {
      plan.kernel = "bwd_keys_pair_kernel";
      plan.key_pairs = pairs(units(plan.key_tiles, parts) + units(plan.key_tiles, parts_of_dv));
      plan.ctas = 2 * plan.key_pairs;
    }
    if (parts == 2) {
      plan.dq_kernel = "bwd_queries_pair_kernel";
      plan.row_pairs = pairs(plan.row_tiles);
      plan.dq_ctas = 2 * plan.row_pairs;
    }
    if (int const most = std::max(plan.key_pairs, plan.row_pairs); most > 0) {
      plan.workspace.pairs = plan.workspace.bytes;
      plan.workspace.bytes += pair_bytes(most);
    }
  }
};

}  // namespace flash_cute::sm80::backward::streamed
