// Attention over a KV cache on Hopper: what the host knows.
#pragma once

#include "planning/split_keys.h"
#include "sm90/decode/common/small_pages.h"
#include "sm90/decode/long_rows/tile.h"
#include "tile.h"

namespace flash_cute::sm90::decode::split_keys {

struct Family {
  static constexpr Backend kBackend = Backend::kSm90;
  static constexpr char const* kName = "sm90::decode::split_keys";

  static bool serves(HeadDims, KvCacheProblem const&) { return true; }

  static void plan(DecodePlan& plan, KvCacheProblem const& problem, Gpu gpu) {
    int const bytes = plan.float8_cache ? 1 : 2;
    int const ctas_per_sm = split_keys::ctas_per_sm(plan.head_dim, plan.head_dim_v, bytes);
    int const warps = copies(problem) ? warps_of_copied_tile(ctas_per_sm) : 1;
    KernelShape const shape{.block_m = kFewRows,
                            .block_n = tile_keys(plan.head_dim),
                            .threads = threads(warps),
                            .stages = stages(plan.head_dim, plan.head_dim_v, bytes),
                            .smem_bytes = smem_bytes(plan.head_dim, plan.head_dim_v, bytes),
                            .ctas_per_sm = ctas_per_sm};
    plan_long_rows(plan, problem, gpu);
    if (all_are_long(plan, problem.call)) {
      plan.family = "sm90::decode::long_rows";
      plan.kernel = "long_rows_kernel";
      plan.shape = long_rows::kernel_shape(plan.head_dim, plan.float8_cache);
      plan.many_rows = plan.shape.block_m;
      return;
    }
    // Caches of float8 are cut as those of 16 bits: the bits are equal.
    int const ctas = split_keys::ctas_per_sm(plan.head_dim, plan.head_dim_v, 2);
    plan_ranges(plan, problem, shape, {.most_pieces = most_pieces(problem.call.heads_kv, ctas)}, gpu);
  }

  static std::vector<std::string> notes(DecodePlan const& plan, KvCacheProblem const& problem) {
    std::vector<std::string> found;
    if (!all_are_long(plan, problem.call)) found = range_notes(plan);
    bool const copies_long = long_rows::copies_rows(problem.cache.paged, problem.cache.page, row_bytes(plan));
    if (all_are_long(plan, problem.call) ? copies_long : copies(problem)) {
      found.push_back(note_of_copies(problem.cache.page, copies_long ? 0 : plan.long_rows));
    }
    if (plan.long_rows == 0) return found;
    std::string const rows = std::to_string(long_rows::kernel_shape(plan.head_dim, plan.float8_cache).block_m);
    found.push_back("Sequences of " + std::to_string(plan.long_rows) +
                    " rows and more are computed as a forward computes them: a CTA has a tile of " + rows +
                    " rows of a query head, and all its keys.");
    return found;
  }

 private:
  static bool copies(KvCacheProblem const& problem) { return copies_rows(problem.cache.paged, problem.cache.page); }
  static int row_bytes(DecodePlan const& plan) { return plan.head_dim * (plan.float8_cache ? 1 : 2); }
  static void plan_long_rows(DecodePlan& plan, KvCacheProblem const& problem, Gpu gpu) {
    Problem const& call = problem.call;
    if (call.modifies_scores() || !long_rows::has_kernel(plan.head_dim, plan.head_dim_v, plan.float8_cache)) return;
    int const least = LongRows::least(call.heads_q);
    if (call.len_q < least || call.batch == 0 || call.heads_q == 0) return;
    plan.long_rows = least;
    int const rows = long_rows::kernel_shape(plan.head_dim, plan.float8_cache).block_m;
    // Of packed sequences at most: the host knows their rows in all.
    int64_t const sequences = call.packed ? std::min(call.batch, call.len_q / least) : call.batch;
    int64_t const tiles = sequences * call.heads_q * ((call.len_q + rows - 1) / rows);
    plan.long_ctas = std::min<int64_t>(tiles, gpu.num_sms);
  }
  static bool all_are_long(DecodePlan const& plan, Problem const& call) { return plan.long_rows > 0 && !call.packed; }
};

}  // namespace flash_cute::sm90::decode::split_keys
