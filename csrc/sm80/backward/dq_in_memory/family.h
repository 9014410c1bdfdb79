// The sm80 backward up to head dim 256: choice of the tile table, and plan.
#pragma once

#include "planning/backward.h"
#include "planning/family.h"
#include "planning/work.h"
#include "sm80/common/table.h"
#include "order.h"
#include "tile.h"
#include "time.h"

namespace flash_cute::sm80::backward::dq_in_memory {

struct Family : OneTile {
  static constexpr Backend kBackend = Backend::kSm80;
  static constexpr char const* kName = "sm80::backward::dq_in_memory";
  static constexpr bool kOneHeadDim = true;
  static constexpr bool kReadsMasks = true;

  static bool serves(HeadDims kernel, Problem const& problem) {
    return !problem.has_mask() || has_masked_kernel(kernel.head_dim);
  }

  // On a Hopper GPU, beside the kernels of sm90, the table that was the fastest on an H200 where sm80 was faster
  // (docs/tuning.md).
  static Candidate choose(HeadDims kernel, Problem const& problem, Choice const& asked, bool competes, Gpu gpu) {
    Chip const on_hopper = problem.packed ? (kernel.head_dim == 64 ? kSmem99K : kA100)
                                          : (kernel.head_dim > 128 ? kSmem99K : kH100);
    return {.choice = {.entry = entry_of(asked, competes ? on_hopper : chip_of(gpu.capability))}};
  }

  static double predict(HeadDims kernel, Problem const& problem, Candidate const& chosen, Gpu gpu) {
    bool const known =
        !problem.modifies_scores() && problem.head_dim == problem.head_dim_v && !problem.deterministic &&
        !problem.has_mask();
    if (!known) return kNoTime;
    int const chip = chosen.choice.entry;
    Variant const variant = problem.packed ? Variant::kPacked : Variant::kDense;
    bool const any_scores = problem.packed && !has_plain_sequence_kernel(kernel.head_dim, chip);
    KernelShape const shape = kernel_shape(kernel.head_dim, chip, variant);
    return dq_in_memory::predict(time_model::work_of(problem, gpu), shape, any_scores);
  }

  static void plan(BwdPlan& plan, Problem const& problem, Choice const&, Gpu gpu) {
    plan.variant = bwd_variant(problem);
    if (plan.variant == Variant::kDenseModified) plan.variant = Variant::kModified;
    bool const reads = plan.variant.reads_sequences, masked = plan.variant.reads_mask;
    plan.kernel = masked ? "bwd_masked_kernel" : reads ? "bwd_sequences_kernel" : "bwd_kernel";
    plan.shape = kernel_shape(plan.head_dim, plan.entry, plan.variant);
    lay_out_in_parts(plan, problem,
                     {.block_m = plan.shape.block_m,
                      .head_dim_v = std::max(problem.padded_head_dim(), problem.padded_head_dim_v()),
                      .keeps_tickets = !reads && !masked && plan.deterministic});
    check_num_tiles(plan, problem, plan.shape.block_m);
    if (plan.row_tiles == 0 || plan.key_tiles == 0) return;
    plan.ctas = plan.key_tiles;
    plan.dq_ctas = plan.row_tiles;
    if (reads) return;
    if (masked) plan.mask = {.unit_rows = plan.shape.block_m, .block_n = plan.shape.block_n, .lists_keys = true};
    int const group = problem.heads_q / problem.heads_kv, block_m = plan.shape.block_m;
    int const most_rows = static_cast<int>(most_rows_of_key_tile(problem, plan.shape.block_n));
    int64_t const rows = num_tiles(most_rows, block_m, 1) * block_m * group;
    plan.launch_order = launch_order(plan.head_dim, plan.shape, problem.is_masked(), plan.deterministic, rows, group,
                                     plan.n_blocks, problem.batch * problem.heads_kv, gpu.num_sms,
                                     /*may_reverse=*/!masked);
  }

  static char const* tile_name(BwdPlan const& plan) { return kChipNames[plan.entry]; }

  static std::string why_tile(BwdPlan const& plan, Problem const&, Gpu) {
    bool const modified = plan.variant.modifies_scores;
    if (plan.variant.reads_mask) {
      bool const plain = !modified && has_plain_masked_kernel(plan.head_dim, plan.entry);
      return plain ? " with a mask, on chips with 163 KB of shared memory per CTA or more"
                   : " with a mask, on any chip";
    }
    bool const plain = !modified && has_plain_sequence_kernel(plan.head_dim, plan.entry);
    if (!plan.variant.reads_sequences || plain) return chip_text(plan.entry);
    return " for packed batches and modified scores, on any chip";
  }
};

}  // namespace flash_cute::sm80::backward::dq_in_memory
