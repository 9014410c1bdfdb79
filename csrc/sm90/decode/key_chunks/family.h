// Row-invariant attention over a KV cache on Hopper: what the host knows.
#pragma once

#include "planning/decode.h"
#include "tile.h"

namespace flash_cute::sm90::decode::key_chunks {

// What both families, of caches and of forwards, say of their work.
inline std::vector<std::string> notes(int head_dim, Work const& work) {
  std::vector<std::string> found{"The bits of a row depend on its query and its keys alone: the softmax restarts at "
                                 "each chunk of " + std::to_string(chunk_keys(head_dim)) +
                                 " keys, and the chunks are folded from the first to the last."};
  if (work.single_ctas > 0) {
    found.push_back("Of sequences of fewer than " + std::to_string(work.long_rows) +
                    " rows each chunk is computed by itself, and a second kernel folds them.");
  }
  return found;
}

struct Family {
  static constexpr Backend kBackend = Backend::kSm90;
  static constexpr char const* kName = "sm90::decode::key_chunks";
  static constexpr bool kRowInvariant = true;

  static bool serves(HeadDims, KvCacheProblem const& problem) { return problem.cache.k_type == CacheType::k16Bit; }

  static void plan(DecodePlan& plan, KvCacheProblem const& problem, Gpu gpu) {
    Rows const rows = rows_of(problem);
    plan.kernel = "chunks_kernel";
    plan.num_sms = gpu.num_sms;
    if (rows.batch == 0 || rows.heads_kv == 0 || rows.heads_q == 0 || rows.len_q == 0) {
      plan.shape = kernel_shape(plan.head_dim, Chunks::kOfOneCta);
      plan.many_rows = plan.shape.block_m;
      return;
    }
    plan.long_rows = Work::choose_long_rows(plan.head_dim, rows, gpu.num_sms);
    Work const work = work_of(plan, problem);
    plan.shape = kernel_shape(plan.head_dim, work.tile_ctas > 0 ? Chunks::kOfOneCta : Chunks::kOfSeveral);
    plan.many_rows = plan.shape.block_m;
    plan.ctas = work.single_ctas;
    plan.long_ctas = work.tile_ctas;
    plan.workspace_bytes = work.bytes;
  }

  static std::vector<std::string> notes(DecodePlan const& plan, KvCacheProblem const& problem) {
    if (plan.ctas == 0 && plan.long_ctas == 0) return {};
    return key_chunks::notes(plan.head_dim, work_of(plan, problem));
  }

 private:
  static Rows rows_of(KvCacheProblem const& problem) {
    Problem const& call = problem.call;
    return {.batch = call.batch,
            .heads_q = call.heads_q,
            .heads_kv = call.heads_kv,
            .len_q = call.len_q,
            .packed = call.packed,
            .capacity = problem.cache.capacity};
  }
  static Work work_of(DecodePlan const& plan, KvCacheProblem const& problem) {
    return Work::of(plan.head_dim, rows_of(problem), plan.long_rows, plan.num_sms);
  }
};

}  // namespace flash_cute::sm90::decode::key_chunks
