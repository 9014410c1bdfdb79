// Attention over a KV cache on Hopper: what the host knows.
#pragma once

#include "planning/check.h"
#include "planning/decode.h"
#include "tile.h"

namespace flash_cute::sm90::decode::split_keys {

struct Family {
  static constexpr Backend kBackend = Backend::kSm90;
  static constexpr char const* kName = "sm90::decode::split_keys";

  // A TMA box has 16 rows of a page at least.
  static constexpr int kLeastBox = 16;

  static bool serves(HeadDims, KvCacheProblem const& problem) {
    CacheProblem const& cache = problem.cache;
    bool const has_16_bits = cache.k_type == CacheType::k16Bit && cache.v_type == CacheType::k16Bit;
    return has_16_bits && (!cache.paged || cache.page % kLeastBox == 0);
  }

  static void plan(DecodePlan& plan, KvCacheProblem const& problem, Gpu gpu) {
    Problem const& call = problem.call;
    int64_t const rows = int64_t{call.len_q} * (call.heads_q / std::max(1, call.heads_kv));  // packed: of all sequences
    plan.kernel = "decode_kernel";
    plan.shape = {.block_m = rows <= kFewRows || call.packed ? kFewRows : kManyRows,
                  .block_n = tile_keys(plan.head_dim),
                  .threads = kThreads,
                  .stages = stages(plan.head_dim, plan.head_dim_v),
                  .smem_bytes = smem_bytes(plan.head_dim, plan.head_dim_v),
                  .ctas_per_sm = ctas_per_sm(plan.head_dim, plan.head_dim_v)};
    plan.most_pieces = most_pieces(call.heads_kv);
    plan.slots = plan.most_pieces + 1;
    plan.slot_rows = static_cast<int>(std::min<int64_t>(rows, kManyRows));
    if (call.batch == 0 || call.heads_kv == 0 || rows == 0) return;
    int const ctas = gpu.num_sms * ctas_per_sm(plan.head_dim, plan.head_dim_v);
    plan.bundles = std::max(1, ctas / call.heads_kv);
    plan.ctas = int64_t{plan.bundles} * call.heads_kv;
    plan.workspace_bytes = part_bytes(plan) * plan.ctas * plan.slots;
  }

  static std::vector<std::string> notes(DecodePlan const& plan, KvCacheProblem const&) {
    return {"The key tiles of all sequences are dealt to " + std::to_string(plan.bundles) +
            " CTAs of each KV head in equal ranges, in pieces that depend on a sequence alone."};
  }

 private:
  static int64_t part_bytes(DecodePlan const& plan) {
    return int64_t{plan.slot_rows} * (plan.head_dim_v + 2) * int64_t{sizeof(float)};
  }
};

}  // namespace flash_cute::sm90::decode::split_keys
