// The row-invariant forward on Hopper: the kernels are those of caches, sm90/decode/key_chunks, where the keys of a
// sequence are one page.
#pragma once

#include "planning/forward.h"
#include "sm90/decode/key_chunks/family.h"

namespace flash_cute::sm90::forward::key_chunks {

namespace chunks = decode::key_chunks;

struct Family : OneTile {
  static constexpr Backend kBackend = Backend::kSm90;
  static constexpr char const* kName = chunks::Family::kName;  // where its kernels are
  static constexpr bool kRowInvariant = true;

  static bool serves(HeadDims, Problem const&) { return true; }

  static void plan(FwdPlan& plan, Problem const& problem, Choice const&, Gpu gpu) {
    plan.kernel = "chunks_kernel";
    plan.variant = Variant::kPacked;
    plan.shape = chunks::kernel_shape(plan.head_dim, chunks::Chunks::kOfOneCta);
    if (fwd_tiles(plan, problem) == 0) return;
    chunks::Work const work = work_of(plan, problem, gpu.num_sms);
    plan.ctas = work.tile_ctas;
    WorkspaceLayout layout;
    plan.workspace.parts = layout.take(work.bytes);
    plan.workspace.bytes = layout.bytes();
  }

  static std::vector<std::string> notes(FwdPlan const& plan, Problem const& problem) {
    if (plan.ctas == 0) return {};
    return chunks::notes(plan.head_dim, work_of(plan, problem, static_cast<int>(plan.ctas)));
  }

 private:
  // A CTA has all chunks of a row tile.
  static chunks::Work work_of(FwdPlan const& plan, Problem const& problem, int num_sms) {
    chunks::Rows const rows{.batch = problem.batch,
                            .heads_q = problem.heads_q,
                            .heads_kv = problem.heads_kv,
                            .len_q = problem.len_q,
                            .packed = problem.packed,
                            .capacity = problem.len_k};
    return chunks::Work::of(plan.head_dim, rows, /*long_rows=*/1, num_sms);
  }
};

}  // namespace flash_cute::sm90::forward::key_chunks
