// What the plans of the forward families have in common.
#pragma once

#include "contract/plan.h"
#include "family.h"
#include "tiles.h"
#include "workspace.h"

namespace flash_cute {

// Of the families whose kernels for dense batches have one head dim, and a head dim of v's own in those alone that read
// the sequences at run time.
inline Variant fwd_variant(HeadDims kernel, Problem const& problem) {
  if (problem.has_mask()) return problem.modifies_scores() ? Variant::kMaskedModified : Variant::kMasked;
  if (problem.modifies_scores()) return Variant::kModified;
  if (problem.accumulate != AccumulateIn::kFloat32) return Variant::kPacked;
  bool const one_head_dim = kernel.head_dim == kernel.head_dim_v;
  bool const own_head_dim = one_head_dim && problem.head_dim_v != problem.head_dim;
  return problem.packed || own_head_dim ? Variant::kPacked : Variant::kDense;
}

// The row tiles that a kernel may have to compute, of all heads.
inline int64_t fwd_tiles(FwdPlan const& plan, Problem const& problem) {
  int64_t const tiles = plan.variant.reads_sequences ? most_row_tiles(problem, plan.shape.block_m)
                                                      : num_row_tiles(problem, plan.shape.block_m);
  check_row_tiles(problem, tiles, plan.shape.block_m);
  return tiles;
}

// Of a family whose tile, or number of CTAs, follows from the number of tiles: what `explain` says of it.
inline std::string tiles_text(FwdPlan const& plan, Problem const& problem, Gpu gpu) {
  return std::string(", with ") + (problem.packed ? "at most " : "") +
         std::to_string(most_row_tiles(problem, plan.shape.block_m)) + " tiles for " + std::to_string(gpu.num_sms) +
         " multiprocessors";
}

// The mean of K's and V's.
inline int mean_head_dim(Problem const& problem) {
  return (problem.padded_head_dim() + problem.padded_head_dim_v()) / 2;
}

// Of Sequences::tiles_before.
inline int64_t prefix_bytes(Problem const& problem) { return 4 * (3 * (int64_t{problem.batch} + 2) + 1); }

}  // namespace flash_cute
