// The plan of kernels that deal ranges of keys to CTAs, see contract/decode.h.
#pragma once

#include "decode.h"

namespace flash_cute {

// Of a kernel with that tile.
inline void plan_ranges(DecodePlan& plan, KvCacheProblem const& problem, KernelShape const& shape, Gpu gpu) {
  Problem const& call = problem.call;
  int64_t const rows = int64_t{call.len_q} * (call.heads_q / std::max(1, call.heads_kv));  // packed: of all sequences
  plan.kernel = "decode_kernel";
  plan.shape = shape;
  plan.shape.block_m = rows <= kFewRows || call.packed ? kFewRows : kManyRows;
  plan.most_pieces = most_pieces(call.heads_kv);
  plan.slots = plan.most_pieces + 1;
  int64_t const slot_rows = std::min<int64_t>(rows, kManyRows);
  plan.slot_rows = static_cast<int>(slot_rows + slot_rows % 2);  // even, so that each part begins at 16 bytes
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

}  // namespace flash_cute
