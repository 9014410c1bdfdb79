// The plan of the Hopper backward for large head dims: a kernel for dK and dV and one for dQ, which are deterministic
// in either mode and read the sequences at run time. A tile may have a cluster of CTAs.
#pragma once

#include "planning/backward.h"
#include "planning/family.h"
#include "tile.h"

namespace flash_cute::sm90::backward::dq_in_registers_large {

struct Family : OneTile {
  static constexpr Backend kBackend = Backend::kSm90;
  static constexpr char const* kName = "sm90::backward::dq_in_registers_large";

  static bool serves(HeadDims, Problem const&) { return true; }

  static void plan(BwdPlan& plan, Problem const& problem, Choice const&, Gpu) {
    int const ctas = ctas_per_tile(plan.head_dim);
    plan.kernel = "bwd_keys_kernel";
    plan.dq_kernel = "bwd_queries_kernel";
    plan.variant = problem.modifies_scores() ? Variant::kModified : Variant::kPacked;
    plan.shape = kernel_shape(plan.head_dim);
    lay_out(plan, problem, {.block_m = kTileRows, .head_dim_v = problem.padded_head_dim_v()});
    check_num_tiles(plan, problem, kTileRows, ctas);
    if (plan.row_tiles == 0 || plan.key_tiles == 0) return;
    plan.ctas = ctas * plan.key_tiles;
    plan.dq_ctas = ctas * plan.row_tiles;
  }

  static std::vector<std::string> notes(BwdPlan const& plan, Problem const&) {
    int const ctas = ctas_per_tile(plan.head_dim);
    std::string const columns = std::to_string(columns_per_cta(plan.head_dim));
    std::string const tile = ctas == 1 ? "A tile has one CTA, with all columns; "
                                       : "A tile has a cluster of " + std::to_string(ctas) +
                                             " CTAs, half of them for q and k and half for dout and v, with " +
                                             columns + " columns each; ";
    return {tile + "the workspace, " + std::to_string((plan.workspace.bytes + 1023) / 1024) +
            " KB, holds two statistics per row and the lists of tiles."};
  }
};

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
