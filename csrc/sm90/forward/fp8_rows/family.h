// The Hopper forward in float8, up to head dim 256: which kernels serve a call, and the plan.
#pragma once

#include "planning/forward.h"
#include "planning/work.h"
#include "sm90/forward/common/draws_tiles.h"
#include "tile.h"

namespace flash_cute::sm90::forward::fp8_rows {

struct Family : OneTile {
  static constexpr Backend kBackend = Backend::kSm90;
  static constexpr char const* kName = "sm90::forward::fp8_rows";
  static constexpr bool kReadsFloat8 = true;

  static bool serves(HeadDims kernel, Problem const& problem) {
    return problem.accumulate == AccumulateIn::kFloat32 &&
           (problem.all_e4m3 || serves_all_formats(kernel.head_dim, kernel.head_dim_v));
  }

  static void plan(FwdPlan& plan, Problem const& problem, Choice const&, Gpu gpu) {
    plan.kernel = "fwd_kernel";
    // The kernels of other formats are of one variant, which serves all calls.
    plan.variant = problem.all_e4m3 ? fwd_variant({plan.head_dim, plan.head_dim_v}, problem) : Variant::kModified;
    plan.shape = kernel_shape(plan.head_dim, plan.head_dim_v, plan.variant.modifies_scores);
    plan.tile_heads = 1;
    int64_t const tiles = fwd_tiles(plan, problem);
    if (tiles == 0) return;  // perhaps there is no head, and no order of tiles then
    bool const reads = plan.variant.reads_sequences, masked = problem.is_masked();
    bool const may_draw = reads ? tiles > gpu.num_sms : masked;
    plan.draws_tiles = may_draw && forward::draws_tiles(time_model::work_of(problem, gpu), plan.shape);
    plan.ctas = std::min<int64_t>(tiles, gpu.num_sms);
    if (plan.draws_tiles) {
      WorkspaceLayout layout;
      plan.workspace.ticket = layout.take(4);
      plan.workspace.zeroed = plan.workspace.bytes = layout.bytes();
    }
    if (reads) return;
    int const head_dim_of_16_bits = mean_head_dim(problem) / 2;  // with as many bytes of K and V
    plan.order = tile_order(plan.shape, masked, problem.batch, problem.heads_q, problem.heads_kv, problem.len_q,
                            problem.len_k, head_dim_of_16_bits, gpu.num_sms);
  }

  static std::string why_tile(FwdPlan const& plan, Problem const& problem, Gpu gpu) {
    return tiles_text(plan, problem, gpu);
  }

  static std::vector<std::string> notes(FwdPlan const&, Problem const&) {
    return {"Float8 halves the bytes of q, k and v; docs/float8.md has its speed beside 16 bits."};
  }
};

}  // namespace flash_cute::sm90::forward::fp8_rows
