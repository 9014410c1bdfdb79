// The sm80 forward up to head dim 256: choice of the tile table, and plan.
#pragma once

#include "planning/forward.h"
#include "planning/work.h"
#include "sm80/common/table.h"
#include "float16_tile.h"
#include "tile.h"
#include "time.h"

namespace flash_cute::sm80::forward::rows {

struct Family : OneTile {
  static constexpr Backend kBackend = Backend::kSm80;
  static constexpr char const* kName = "sm80::forward::rows";
  static constexpr bool kReadsMasks = true;

  static bool serves(HeadDims kernel, Problem const& problem) {
    if (problem.accumulate == AccumulateIn::kFloat32) return has_kernel(kernel.head_dim, fwd_variant(kernel, problem));
    return std::max(problem.head_dim, problem.head_dim_v) <= float16_max_head_dim(problem.accumulate) &&
           !problem.has_mask();
  }

  // On a Hopper GPU, beside the kernels of sm90, the table that was the fastest on an H200 where sm80 was faster
  // (docs/tuning.md).
  static Candidate choose(HeadDims, Problem const& problem, Choice const& asked, bool competes, Gpu gpu) {
    Chip const on_hopper = problem.packed ? kA100 : kSmem99K;
    return {.choice = {.entry = entry_of(asked, competes ? on_hopper : chip_of(gpu.capability))}};
  }

  static double predict(HeadDims kernel, Problem const& problem, Candidate const& chosen, Gpu gpu) {
    bool const known = problem.accumulate == AccumulateIn::kFloat32 && !problem.modifies_scores() &&
                       problem.head_dim == problem.head_dim_v && !problem.has_mask();
    if (!known) return kNoTime;
    KernelShape const shape = kernel_shape(kernel.head_dim, chosen.choice.entry, fwd_variant(kernel, problem));
    return rows::predict(time_model::work_of(problem, gpu), shape);
  }

  static void plan(FwdPlan& plan, Problem const& problem, Choice const&, Gpu) {
    plan.kernel = "fwd_kernel";
    plan.variant = fwd_variant({plan.head_dim, plan.head_dim_v}, problem);
    plan.shape = plan.accumulate == AccumulateIn::kFloat32 ? kernel_shape(plan.head_dim, plan.entry, plan.variant)
                                                         : float16_kernel_shape(plan.head_dim, plan.entry);
    int64_t const tiles = fwd_tiles(plan, problem);
    if (tiles == 0) return;  // perhaps there is no head, and no order of tiles then
    plan.ctas = tiles;
    bool const reads = plan.variant.reads_sequences;
    if (!reads) plan.tile_heads = 1;
    if (plan.variant.reads_mask) plan.mask = {.unit_rows = plan.shape.block_m, .block_n = plan.shape.block_n};
    if (!problem.packed) {
      int const head_dim = reads ? problem.padded_head_dim() : mean_head_dim(problem);
      plan.order = tile_order(plan.shape, reads || problem.is_masked(), problem.batch, problem.heads_q,
                              problem.heads_kv, problem.len_q, problem.len_k, head_dim);
    } else if (problem.batch + 2 > kMostSearchedSequences) {
      WorkspaceLayout layout;
      plan.workspace.tiles_before = layout.take(prefix_bytes(problem));
      plan.workspace.bytes = layout.bytes();
    }
  }

  static char const* tile_name(FwdPlan const& plan) { return kChipNames[plan.entry]; }

  static std::string why_tile(FwdPlan const& plan, Problem const&, Gpu) {
    if (plan.accumulate == AccumulateIn::kFloat32) return chip_text(plan.entry);
    return " of the kernels that accumulate in float16";
  }
};

}  // namespace flash_cute::sm80::forward::rows
