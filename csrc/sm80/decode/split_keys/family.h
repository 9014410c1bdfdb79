// Attention over a KV cache on every chip from Ampere on: what the host knows.
#pragma once

#include "planning/decode.h"
#include "tile.h"

namespace flash_cute::sm80::decode::split_keys {

// The plan of a kernel with that tile; Hopper's family has the same.
inline void plan_ranges(DecodePlan& plan, KvCacheProblem const& problem, KernelShape const& shape, Gpu gpu) {
  Problem const& call = problem.call;
  int64_t const rows = int64_t{call.len_q} * (call.heads_q / std::max(1, call.heads_kv));  // packed: of all sequences
  plan.kernel = "decode_kernel";
  plan.shape = shape;
  plan.shape.block_m = rows <= kFewRows || call.packed ? kFewRows : kManyRows;
  plan.most_pieces = most_pieces(call.heads_kv);
  plan.slots = plan.most_pieces + 1;
  plan.slot_rows = static_cast<int>(std::min<int64_t>(rows, kManyRows));
  if (call.batch == 0 || call.heads_kv == 0 || rows == 0) return;
  plan.bundles = std::max(1, gpu.num_sms * shape.ctas_per_sm / call.heads_kv);
  plan.ctas = int64_t{plan.bundles} * call.heads_kv;
  int64_t const part_bytes = int64_t{plan.slot_rows} * (plan.head_dim_v + 2) * int64_t{sizeof(float)};
  plan.workspace_bytes = part_bytes * plan.ctas * plan.slots;
}

inline std::vector<std::string> range_notes(DecodePlan const& plan) {
  return {"The key tiles of all sequences are dealt to " + std::to_string(plan.bundles) +
          " CTAs of each KV head in equal ranges, in pieces that depend on a sequence alone."};
}

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
    plan_ranges(plan, problem, shape, gpu);
  }

  static std::vector<std::string> notes(DecodePlan const& plan, KvCacheProblem const&) { return range_notes(plan); }
};

}  // namespace flash_cute::sm80::decode::split_keys
