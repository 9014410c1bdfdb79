// The plan of the Hopper backward above head dim 128: a kernel for dK and dV and one for dQ, which are deterministic in
// either mode.
#pragma once

#include "planning/backward.h"
#include "planning/family.h"
#include "planning/work.h"
#include "tile.h"
#include "time.h"

namespace flash_cute::sm90::backward::dq_in_registers {

struct Family : OneTile {
  static constexpr Backend kBackend = Backend::kSm90;
  static constexpr char const* kName = "sm90::backward::dq_in_registers";
  static constexpr bool kReadsMasks = true;

  static bool serves(HeadDims kernel, Problem const& problem) {
    return has_kernel(kernel.head_dim, kernel.head_dim_v, bwd_variant(problem), problem.bfloat16);
  }

  static double predict(HeadDims kernel, Problem const& problem, Candidate const&, Gpu gpu) {
    KernelShape const shape = kernel_shape(kernel.head_dim, kernel.head_dim_v);
    return dq_in_registers::predict(time_model::work_of(problem, gpu), shape);
  }

  static void plan(BwdPlan& plan, Problem const& problem, Choice const&, Gpu) {
    plan.kernel = "bwd_keys_kernel";
    plan.dq_kernel = "bwd_queries_kernel";
    plan.variant = bwd_variant(problem);
    plan.shape = kernel_shape(plan.head_dim, plan.head_dim_v);
    if (problem.has_mask()) plan.mask = {.unit_rows = kRows, .block_n = kKeys, .lists_keys = true};
    bool const reads = plan.variant.reads_sequences;
    lay_out_in_parts(plan, problem,
                     {.block_m = reads ? kQueryTileRows : kRows, .head_dim_v = problem.padded_head_dim_v()});
    check_num_tiles(plan, problem, kRows);
    if (plan.row_tiles == 0 || plan.key_tiles == 0) return;
    plan.ctas = plan.key_tiles;
    plan.dq_ctas = reads ? plan.row_tiles
                         : num_tiles(problem.len_q, kQueryTileRows, int64_t{problem.batch} * problem.heads_q);
  }
};

}  // namespace flash_cute::sm90::backward::dq_in_registers
