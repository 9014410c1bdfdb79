// The Hopper backward up to head dim 128, and of head dims 192 and 128: choice, and plan.
#pragma once

#include "planning/backward.h"
#include "planning/family.h"
#include "planning/work.h"
#include "order.h"
#include "tile.h"
#include "time.h"

namespace flash_cute::sm90::backward::dq_in_memory {

struct Family : OneTile {
  static constexpr Backend kBackend = Backend::kSm90;
  static constexpr char const* kName = "sm90::backward::dq_in_memory";
  static constexpr bool kReadsMasks = true;

  static bool serves(HeadDims kernel, Problem const& problem) {
    return has_kernel(kernel.head_dim, kernel.head_dim_v, bwd_variant(problem), problem.bfloat16);
  }

  static double predict(HeadDims kernel, Problem const& problem, Candidate const&, Gpu gpu) {
    Variant const variant = problem.packed ? Variant::kPacked : Variant::kDense;
    KernelShape const shape = kernel_shape(kernel.head_dim, kernel.head_dim_v, variant);
    return dq_in_memory::predict(time_model::work_of(problem, gpu), shape);
  }

  static void plan(BwdPlan& plan, Problem const& problem, Choice const& choice, Gpu gpu) {
    plan.kernel = "bwd_kernel";
    plan.variant = bwd_variant(problem);
    bool const reads = plan.variant.reads_sequences;
    if (is_mla(plan.head_dim, plan.head_dim_v)) {
      plan.scales_dout = problem.has_sinks_and_dlse();  // its dS is made from P in float16, whatever the dtype
    }
    plan.shape = kernel_shape(plan.head_dim, plan.head_dim_v, plan.variant);
    if (problem.has_mask()) {
      plan.mask = {.unit_rows = plan.shape.block_m, .block_n = plan.shape.block_n, .lists_keys = true};
    }
    lay_out_in_parts(plan, problem,
                     {.block_m = plan.shape.block_m, .head_dim_v = problem.padded_head_dim_v(), .has_queue = reads});
    check_num_tiles(plan, problem, plan.shape.block_m);
    if (plan.row_tiles == 0 || plan.key_tiles == 0) return;
    if (reads) {
      plan.ctas = std::min<int64_t>(plan.key_tiles, gpu.num_sms);  // their tasks convert dQ's sums, see dq_queue.cuh
    } else {
      plan_order(plan, problem, choice, gpu);
    }
  }

 private:
  static void plan_order(BwdPlan& plan, Problem const& problem, Choice const& choice, Gpu gpu) {
    bool const masked = problem.is_masked();
    int const heads_per_kv = problem.heads_q / problem.heads_kv;
    int64_t visited = num_tiles(static_cast<int>(most_rows_of_key_tile(problem, plan.shape.block_n)),
                                plan.shape.block_m, 1);
    // Where a window limits the rows of a key tile, few heads at a time keep Q, dO and dQ in L2.
    if (problem.band.has_lower()) visited *= heads_per_kv;
    TileCounts const counts{.m_blocks = plan.m_blocks,
                            .n_blocks = plan.n_blocks,
                            .heads_per_kv = heads_per_kv,
                            .heads = int64_t{problem.batch} * problem.heads_kv,
                            .visited_rows = static_cast<int>(visited)};
    plan.task_order = task_order(counts, masked, plan.deterministic, gpu.num_sms);
    FLASH_CUTE_CHECK(plan.task_order.num_tasks > 0,
                     "q: expected fewer tiles of work, of which there are at most 2^31 - 1; got ",
                     q_text(problem));
    if (choice.split != 0) {
      plan.split = split_key_tiles(plan.task_order, counts, plan.shape, masked, plan.deterministic, gpu.num_sms);
    }
    plan.ctas = std::min<int64_t>(plan.task_order.num_tasks, gpu.num_sms);
  }
};

}  // namespace flash_cute::sm90::backward::dq_in_memory
