// Attention over a KV cache on every chip from Ampere on: what the host knows.
#pragma once

#include "planning/split_keys.h"
#include "tile.h"

namespace flash_cute::sm80::decode::split_keys {

struct Family {
  static constexpr Backend kBackend = Backend::kSm80;
  static constexpr char const* kName = "sm80::decode::split_keys";

  static bool serves(HeadDims, KvCacheProblem const& problem) {
    return problem.cache.k_type == CacheType::k16Bit && problem.cache.v_type == CacheType::k16Bit;
  }

  static void plan(DecodePlan& plan, KvCacheProblem const& problem, Gpu gpu) {
    KernelShape const shape{.block_m = kFewRows,
                            .block_n = tile_keys(plan.head_dim),
                            .threads = 32 * kConsumerWarps,
                            .stages = kStages,
                            .smem_bytes = smem_bytes(plan.head_dim, plan.head_dim_v),
                            .ctas_per_sm = 1};
    // As many as two CTAs would need, which deals more evenly: fewer pieces have not been measured here.
    plan_ranges(plan, problem, shape, {.most_pieces = most_pieces(problem.call.heads_kv, 2)}, gpu);
  }

  static std::vector<std::string> notes(DecodePlan const& plan, KvCacheProblem const&) { return range_notes(plan); }
};

}  // namespace flash_cute::sm80::decode::split_keys
