// Attention over a KV cache with large head dims, on every chip from Ampere on: what the host knows.
#pragma once

#include "planning/split_keys.h"
#include "tile.h"

namespace flash_cute::sm80::decode::streamed {

struct Family {
  static constexpr Backend kBackend = Backend::kSm80;
  static constexpr char const* kName = "sm80::decode::streamed";

  static bool serves(HeadDims, KvCacheProblem const& problem) {
    return problem.cache.k_type == CacheType::k16Bit && problem.cache.v_type == CacheType::k16Bit;
  }

  static void plan(DecodePlan& plan, KvCacheProblem const& problem, Gpu gpu) {
    Chip const chip = chip_of(gpu.capability);
    int const heads_kv = problem.call.heads_kv;
    Cuts const cuts{.most_pieces = most_pieces(heads_kv, plan.head_dim_v),
                    .many_rows = many_rows(chip, plan.head_dim, plan.head_dim_v),
                    .most_pieces_of_many = std::min(kPiecesOfMany, most_pieces(heads_kv, plan.head_dim_v))};
    KernelShape shape{.block_m = kFewRows,
                      .block_n = kTileKeys,
                      .threads = kThreads,
                      .stages = 0,
                      .smem_bytes = kMaxSmemBytes[chip],
                      .ctas_per_sm = 1};
    plan_ranges(plan, problem, shape, cuts, gpu);
    int const of_tile = tile_slabs(problem.call.head_dim, problem.call.head_dim_v, plan.head_dim_v);
    plan.shape.stages = stages(slab_bytes(chip), plan.shape.block_m, problem.call.head_dim, of_tile);
  }

  static std::vector<std::string> notes(DecodePlan const& plan, KvCacheProblem const&) { return range_notes(plan); }
};

}  // namespace flash_cute::sm80::decode::streamed
