// The plan of the Hopper forwards for large head dims, pair_by_turns and pair_by_columns: two CTAs compute a row tile.
// There are two kernels of each, for plain and for modified scores, which read the sequences at run time.
#pragma once

#include "planning/forward.h"

namespace flash_cute::sm90::forward::pair {

struct TwoCtaFamily : OneTile {
  static constexpr Backend kBackend = Backend::kSm90;

  static bool serves(HeadDims, Problem const& problem) { return problem.accumulate == AccumulateIn::kFloat32; }

  static std::string why_tile(FwdPlan const& plan, Problem const& problem, Gpu gpu) {
    return tiles_text(plan, problem, gpu);
  }

  static std::vector<std::string> notes(FwdPlan const&, Problem const&) {
    return {"The columns of out are split over 2 CTAs per row tile, which also divide the work on its scores."};
  }

 protected:
  // `plan.kernel` and `plan.shape` are known.
  static void plan_pairs(FwdPlan& plan, Problem const& problem, Gpu gpu) {
    constexpr int kCtas = 2;
    plan.variant = problem.modifies_scores() ? Variant::kModified : Variant::kPacked;
    plan.column_parts = kCtas;
    plan.tile_heads = 1;
    int64_t const tiles = fwd_tiles(plan, problem);
    int const slots = gpu.num_sms / kCtas;
    plan.draws_tiles = tiles > slots;
    plan.ctas = kCtas * std::min<int64_t>(tiles, slots);
    if (!plan.draws_tiles) return;
    WorkspaceLayout layout;
    plan.workspace.ticket = layout.take(4);
    plan.workspace.zeroed = plan.workspace.bytes = layout.bytes();
  }
};

}  // namespace flash_cute::sm90::forward::pair
