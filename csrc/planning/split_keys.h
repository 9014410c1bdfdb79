// The plan of kernels that deal ranges of keys to CTAs, see contract/decode.h.
#pragma once

#include "decode.h"

namespace flash_cute {

// How the units of a family are cut.
struct Cuts {
  int most_pieces;                  // of a unit
  int many_rows = kManyRows;        // of a row tile of a sequence of more than kFewRows rows
  int most_pieces_of_many = most_pieces;  // of such a unit
};

// Of a kernel with that tile.
inline void plan_ranges(DecodePlan& plan, KvCacheProblem const& problem, KernelShape const& shape, Cuts const& cuts,
                        Gpu gpu) {
  Problem const& call = problem.call;
  int64_t const rows = int64_t{call.len_q} * (call.heads_q / std::max(1, call.heads_kv));  // packed: of all sequences
  plan.kernel = "decode_kernel";
  plan.shape = shape;
  plan.shape.block_m = rows <= kFewRows || call.packed ? kFewRows : cuts.many_rows;
  plan.most_pieces = cuts.most_pieces;
  plan.many_rows = cuts.many_rows;
  // No family has shorter pieces, so that a short cache has fewer. (The rule itself never sees the capacity.)
  int const of_capacity = problem.cache.capacity / kLeastPieceKeys + 1;
  int const pieces_of_few = std::min(cuts.most_pieces, of_capacity);
  int const pieces_of_many = std::min(cuts.most_pieces_of_many, of_capacity);
  // Even, so that each part begins at 16 bytes.
  auto const rows_of_part = [&](int most) { return static_cast<int>((std::min<int64_t>(rows, most) + 1) / 2 * 2); };
  plan.slot_rows = rows_of_part(cuts.many_rows);
  int const of_few = rows <= kFewRows || call.packed ? pieces_of_few * rows_of_part(kFewRows) : 0;
  int const of_many = rows > kFewRows ? pieces_of_many * plan.slot_rows : 0;
  plan.part_rows = plan.slot_rows + std::max(of_few, of_many);
  if (call.batch == 0 || call.heads_kv == 0 || rows == 0) return;
  plan.bundles = std::max(1, gpu.num_sms * shape.ctas_per_sm / call.heads_kv);
  plan.ctas = int64_t{plan.bundles} * call.heads_kv;
  int64_t const row_bytes = (plan.head_dim_v + 2) * int64_t{sizeof(float)};
  plan.workspace_bytes = row_bytes * plan.ctas * plan.part_rows;
}

inline std::vector<std::string> range_notes(DecodePlan const& plan) {
  return {"The key tiles of all sequences are dealt to " + std::to_string(plan.bundles) +
          " CTAs of each KV head in equal ranges, in pieces that depend on a sequence alone."};
}

}  // namespace flash_cute
