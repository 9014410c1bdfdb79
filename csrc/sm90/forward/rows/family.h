// The Hopper forward up to head dim 320: choice of the tile, and plan.
#pragma once

#include <limits>

#include "planning/forward.h"
#include "planning/work.h"
#include "tile.h"
#include "time.h"

namespace flash_cute::sm90::forward::rows {

struct Family : OneTile {
  static constexpr Backend kBackend = Backend::kSm90;
  static constexpr char const* kName = "sm90::forward::rows";

  static bool serves(HeadDims, Problem const& problem) { return problem.accumulate == AccumulateIn::kFloat32; }

  static Candidate choose(HeadDims kernel, Problem const& problem, Choice const& asked, bool, Gpu gpu) {
    auto const [head_dim, head_dim_v] = kernel;
    Variant const variant = fwd_variant(kernel, problem);
    bool const only_asked = has_kernel(head_dim, head_dim_v, asked.entry, variant);
    Work const work = time_model::work_of(problem, gpu);
    Candidate best{.us = std::numeric_limits<double>::infinity()};
    for (int entry = 0; entry < kNumEntries; ++entry) {
      if (only_asked ? entry != asked.entry : !is_candidate(head_dim, head_dim_v, entry, variant)) continue;
      KernelShape const shape = kernel_shape(head_dim, entry, head_dim_v);
      int const heads = variant == Variant::kDense ? heads_of_tile(problem, shape) : 1;
      auto const consider = [&](TileSplit const& split) {
        double const us = rows::predict(work, shape, speed(head_dim_v, entry), heads, split);
        if (us < best.us) best = {{.entry = entry, .split = split.tiles > 0}, us};
      };
      bool const may_split = variant == Variant::kDense && asked.split != 0;
      TileSplit const split = may_split ? split_tiles(work, shape) : TileSplit{};
      if (asked.split != 1 || split.tiles == 0) consider({});
      if (split.tiles > 0) consider(split);
    }
    return best;
  }

  static double predict(HeadDims, Problem const&, Candidate const& chosen, Gpu) { return chosen.us; }

  static void plan(FwdPlan& plan, Problem const& problem, Choice const& choice, Gpu gpu) {
    plan.kernel = "fwd_kernel";
    plan.variant = fwd_variant({plan.head_dim, plan.head_dim_v}, problem);
    plan.shape = kernel_shape(plan.head_dim, plan.entry, plan.head_dim_v);
    int64_t const tiles = fwd_tiles(plan, problem);
    if (tiles == 0) return;  // perhaps there is no head, and no order of tiles then
    bool const reads = plan.variant.reads_sequences, masked = problem.is_masked();
    bool const may_draw = reads ? tiles > gpu.num_sms : masked;
    plan.draws_tiles = may_draw && draws_tiles(time_model::work_of(problem, gpu), plan.shape);
    if (!reads && choice.split == 1) plan.split = split_tiles(time_model::work_of(problem, gpu), plan.shape);
    bool const only_split = plan.split.tiles > 0 && plan.split.tiles == tiles;
    plan.ctas = only_split ? plan.split.ranges : std::min<int64_t>(tiles, gpu.num_sms);
    lay_out_workspace(plan);
    if (reads) return;
    plan.tile_heads = heads_of_tile(problem, plan.shape);
    plan.order = tile_order(plan.shape, masked, problem.batch, problem.heads_q, problem.heads_kv, problem.len_q,
                            problem.len_k, mean_head_dim(problem), gpu.num_sms, plan.tile_heads);
  }

  static char const* tile_name(FwdPlan const& plan) { return kEntryNames[plan.entry]; }

  static std::string why_tile(FwdPlan const& plan, Problem const& problem, Gpu gpu) {
    return tiles_text(plan, problem, gpu);
  }

 private:
  // The query heads of a row tile.
  static int heads_of_tile(Problem const& problem, KernelShape const& shape) {
    bool const window = problem.band.is_window(problem.len_k);
    return tile_heads(shape, window, problem.heads_q / std::max(1, problem.heads_kv));
  }

  static void lay_out_workspace(FwdPlan& plan) {
    if (!plan.draws_tiles && plan.split.tiles == 0) return;
    FwdWorkspace& workspace = plan.workspace;
    WorkspaceLayout layout;
    workspace.ticket = layout.take(4);
    if (plan.split.tiles > 0) workspace.part_flags = layout.take(4 * part_flags(plan.shape, plan.split), 4);
    workspace.zeroed = layout.bytes();
    if (plan.split.tiles > 0) workspace.parts = layout.take(parts_bytes(plan.shape, plan.head_dim_v, plan.split));
    workspace.bytes = layout.bytes();
  }
};

}  // namespace flash_cute::sm90::forward::rows
