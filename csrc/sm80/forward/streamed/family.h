// The plan of the sm80 forward for head dims above 256. One kernel serves every call: it reads the sequences, the mask,
// by intervals or bits too, and the terms of the score at run time.
#pragma once

#include "planning/forward.h"
#include "sm80/forward/rows/tile.h"
#include "sm80/common/table.h"
#include "pair.h"
#include "tile.h"

namespace flash_cute::sm80::forward::streamed {

struct Family : OneTile {
  static constexpr Backend kBackend = Backend::kSm80;
  static constexpr char const* kName = "sm80::forward::streamed";
  static constexpr bool kReadsMasks = true;

  static bool serves(HeadDims, Problem const& problem) { return problem.accumulate == AccumulateIn::kFloat32; }

  static Candidate choose(HeadDims, Problem const&, Choice const& asked, bool, Gpu gpu) {
    return {.choice = {.entry = entry_of(asked, chip_of(gpu.capability))}};
  }

  static void plan(FwdPlan& plan, Problem const& problem, Choice const&, Gpu gpu) {
    plan.kernel = "fwd_streamed_kernel";
    plan.variant = Variant::kModified;
    plan.shape = kernel_shape(problem.padded_head_dim(), plan.entry);
    plan.column_parts = streaming::column_parts(problem.padded_head_dim_v());
    plan.tile_heads = 1;
    if (problem.has_mask()) plan.mask = {.unit_rows = kBlockM, .block_n = kBlockN};
    int64_t const tiles = plan.ctas = fwd_tiles(plan, problem);
    if (tiles == 0) return;
    WorkspaceLayout layout;
    if (plan.column_parts == 2 && gpu.num_sms > 1) {  // a partner that did not run would be waited for in vain
      plan_pairs(plan, layout, tiles, gpu);
    }
    if (problem.packed) {
      plan.workspace.tiles_before = layout.take(prefix_bytes(problem));
    } else {
      plan.order = forward::tile_order(plan.shape, /*masked=*/true, problem.batch, problem.heads_q, problem.heads_kv,
                                   problem.len_q, problem.len_k, mean_head_dim(problem));
    }
    plan.workspace.bytes = layout.bytes();
  }

  static char const* tile_name(FwdPlan const& plan) { return kChipNames[plan.entry]; }

  static std::string why_tile(FwdPlan const& plan, Problem const&, Gpu) { return chip_text(plan.entry); }

  static std::vector<std::string> notes(FwdPlan const& plan, Problem const&) {
    if (plan.column_parts == 1) return {};
    return {"The columns of out are split over 2 CTAs per row tile, " +
            std::string(plan.pairs_ctas ? "each of which computes the scores of every second key tile, and sends P to "
                                          "the other one."
                                        : "each of which computes the scores of its rows.")};
  }

 private:
  static void plan_pairs(FwdPlan& plan, WorkspaceLayout& layout, int64_t tiles, Gpu gpu) {
    int64_t const pairs = std::min<int64_t>(tiles, gpu.num_sms / 2);
    plan.kernel = "fwd_streamed_pair_kernel";
    plan.pairs_ctas = true;
    plan.row_tiles = tiles;
    plan.ctas = 2 * pairs;
    plan.workspace.ticket = layout.take(4);
    plan.workspace.part_flags = layout.take(pairs * streaming::kFlagBytesPerPair);
    plan.workspace.zeroed = layout.bytes();
    plan.workspace.parts = layout.take(pairs * streaming::kMessageBytesPerPair<Message>);
  }
};

}  // namespace flash_cute::sm80::forward::streamed
