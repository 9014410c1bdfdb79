// The Hopper forward with a mask by intervals of rows per column, up to head dim 320.
#pragma once

#include "planning/forward.h"
#include "tile.h"

namespace flash_cute::sm90::forward::masked_rows {

struct Family : OneTile {
  static constexpr Backend kBackend = Backend::kSm90;
  static constexpr char const* kName = "sm90::forward::masked_rows";
  static constexpr bool kReadsMasks = true;

  static bool serves(HeadDims, Problem const& problem) { return problem.has_mask(); }

  static Candidate choose(HeadDims kernel, Problem const& problem, Choice const& asked, bool, Gpu) {
    int const entry = entry_of(kernel.head_dim, kernel.head_dim_v, problem.mask_blocks);
    return {.choice = {.entry = entry, .split = asked.split}};
  }

  static void plan(FwdPlan& plan, Problem const& problem, Choice const&, Gpu gpu) {
    plan.kernel = "fwd_kernel";
    plan.variant = fwd_variant({plan.head_dim, plan.head_dim_v}, problem);
    plan.shape = kernel_shape(plan.head_dim, plan.head_dim_v, plan.entry);
    int64_t const tiles = fwd_tiles(plan, problem);
    if (tiles == 0) return;  // perhaps there is no head, and no order of tiles then
    plan.tile_heads = 1;
    plan.ctas = std::min<int64_t>(tiles, gpu.num_sms);
    plan.order = tile_order(plan.shape, /*masked=*/true, problem.batch, problem.heads_q, problem.heads_kv,
                            problem.len_q, problem.len_k, mean_head_dim(problem), gpu.num_sms);
    plan.mask.unit_rows = kUnitRows;
    plan.mask.block_n = plan.shape.block_n;
    plan.draws_tiles = tiles > gpu.num_sms;
    if (!plan.draws_tiles) return;
    plan.mask.tile_units = plan.shape.block_m / kUnitRows;
    WorkspaceLayout layout;
    plan.workspace.ticket = layout.take(4);
    plan.workspace.zeroed = plan.workspace.bytes = layout.bytes();
  }

  static std::vector<std::string> notes(FwdPlan const& plan, Problem const&) {
    if (plan.entry != kOfBlocks) return {};
    return {"The mask has blocks: key tiles are as wide as these, " + std::to_string(plan.shape.stages) +
            " of them are in shared memory, and a warpgroup goes on to the next one that it sees."};
  }

  static std::string why_tile(FwdPlan const& plan, Problem const& problem, Gpu gpu) {
    return tiles_text(plan, problem, gpu);
  }
};

}  // namespace flash_cute::sm90::forward::masked_rows
