// Attention over a KV cache on Hopper: what the host knows.
#pragma once

#include "planning/split_keys.h"
#include "tile.h"

namespace flash_cute::sm90::decode::split_keys {

struct Family {
  static constexpr Backend kBackend = Backend::kSm90;
  static constexpr char const* kName = "sm90::decode::split_keys";

  static bool serves(HeadDims kernel, KvCacheProblem const& problem) {
    if (problem.cache.k_type == CacheType::k16Bit) return true;
    if (!reads_float8(kernel.head_dim, kernel.head_dim_v)) return false;
    // A box of one row begins at a multiple of 128 bytes, as TMA wants it, where chunks are so wide.
    bool const wide = kernel.head_dim % 128 == 0 && kernel.head_dim_v % 128 == 0;
    return wide || !problem.cache.paged || problem.cache.page % 2 == 0;
  }

  static void plan(DecodePlan& plan, KvCacheProblem const& problem, Gpu gpu) {
    int const bytes = plan.float8_cache ? 1 : 2;
    KernelShape const shape{.block_m = kFewRows,
                            .block_n = tile_keys(plan.head_dim),
                            .threads = kThreads,
                            .stages = stages(plan.head_dim, plan.head_dim_v, bytes),
                            .smem_bytes = smem_bytes(plan.head_dim, plan.head_dim_v, bytes),
                            .ctas_per_sm = ctas_per_sm(plan.head_dim, plan.head_dim_v, bytes)};
    plan_ranges(plan, problem, shape, {.most_pieces = most_pieces(problem.call.heads_kv)}, gpu);
  }

  static std::vector<std::string> notes(DecodePlan const& plan, KvCacheProblem const&) {
    return range_notes(plan);
  }
};

}  // namespace flash_cute::sm90::decode::split_keys
