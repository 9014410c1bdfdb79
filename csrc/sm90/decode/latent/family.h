// Multi-head latent attention over a KV cache on Hopper: what the host knows.
#pragma once

#include "planning/split_keys.h"
#include "sm90/decode/common/small_pages.h"
#include "tile.h"

namespace flash_cute::sm90::decode::latent {

struct Family {
  static constexpr Backend kBackend = Backend::kSm90;
  static constexpr char const* kName = "sm90::decode::latent";

  static bool serves(HeadDims, KvCacheProblem const& problem) {
    return problem.cache.k_type == CacheType::k16Bit && problem.cache.values_in_keys;
  }

  static void plan(DecodePlan& plan, KvCacheProblem const& problem, Gpu gpu) {
    KernelShape const shape{.block_m = kRows,
                            .block_n = kTileKeys,
                            .threads = kThreads,
                            .stages = kStages,
                            .smem_bytes = kSmemBytes,
                            .ctas_per_sm = 1};
    KvCacheProblem shared = problem;
    shared.call.heads_kv *= shares(problem);
    plan.cut_at_ranges = !problem.batch_invariant;
    int const tiles = problem.cache.capacity / kTileKeys + 1;
    Cuts cuts{.most_pieces = pieces_of_few().pieces(tiles),
              .many_rows = kRows,
              .most_pieces_of_many = pieces_of_many().pieces(tiles)};
    if (plan.cut_at_ranges) cuts.most_pieces = cuts.most_pieces_of_many = 1;  // that a bundle has
    plan_ranges(plan, shared, shape, cuts, gpu);
    plan.workspace_bytes += int64_t{plan.bundles} * kFirstUnitBytes;
    plan.shape.block_m = kRows;  // also of few rows
  }

  static std::vector<std::string> notes(DecodePlan const& plan, KvCacheProblem const& problem) {
    std::vector<std::string> notes{"v_cache is a view of k_cache's first columns: keys and values are read once."};
    if (int const count = shares(problem); count > 1) {
      notes.push_back("The query heads of a KV head are shared by " + std::to_string(count) +
                      " CTAs, which read the same keys at the same time.");
    }
    notes.push_back("The key tiles of all sequences are dealt to " + std::to_string(plan.bundles) +
                    (shares(problem) > 1 ? " groups of CTAs" : " CTAs") +
                    " of each KV head in equal ranges, in pieces that " +
                    (plan.cut_at_ranges ? "end where the ranges do: the bits depend on the batch."
                                        : "depend on a sequence alone."));
    CacheProblem const& cache = problem.cache;
    if (copies_rows(cache.paged, cache.page)) notes.push_back(note_of_copies(cache.page, 0));
    return notes;
  }

 private:
  static int shares(KvCacheProblem const& problem) {
    return head_shares(problem.call.heads_q / std::max(1, problem.call.heads_kv));
  }
};

}  // namespace flash_cute::sm90::decode::latent
