// What the plans of the backward families have in common: the workspace, and the parts of many short sequences.
#pragma once

#include "contract/plan.h"
#include "tiles.h"
#include "workspace.h"

namespace flash_cute {

// What a family puts into the workspace beside what all have.
struct BwdMemory {
  int block_m;       // the rows of one of plan.row_tiles
  int head_dim_v;    // columns of scaled_dout
  bool keeps_tickets = false;
  bool has_queue = false;
};

inline BwdWorkspace bwd_workspace(BwdPlan const& plan, Problem const& problem, BwdMemory const& memory) {
  int64_t const rows = plan.row_tiles * memory.block_m;
  bool const sums = !plan.shape.dq_in_registers;
  WorkspaceLayout layout;
  BwdWorkspace workspace;
  if (sums) workspace.dq_acc = layout.take(4 * rows * plan.head_dim);
  workspace.lse_log2 = layout.take(4 * rows);
  workspace.delta = layout.take(4 * rows);
  if (sums) {
    int64_t const heads = int64_t{problem.batch} * problem.heads_q;
    workspace.semaphores = layout.take(4 * plan.row_tiles);
    workspace.counters = layout.take(4 * std::max<int64_t>(1 + heads, 4), 4);  // see DqQueue
  }
  if (memory.keeps_tickets) workspace.drawn = layout.take(4 * plan.key_tiles);
  if (problem.has_sinks) workspace.sink_parts = layout.take(4 * plan.row_tiles * plan.parts);
  if (plan.scales_dout) {
    int64_t const all_rows = int64_t{problem.packed ? 1 : problem.batch} * problem.heads_q * problem.lse_rows;
    workspace.scaled_dout = layout.take(2 * all_rows * memory.head_dim_v);
  }
  if (memory.has_queue) workspace.dq_queue = layout.take(2 * 4 * plan.row_tiles);
  if (plan.variant.reads_sequences) {
    int64_t const most_sequences = int64_t{problem.batch} + 2;  // see sequence_count
    workspace.row_sequence = layout.take(4 * int64_t{plan.m_blocks});
    workspace.key_sequence = layout.take(4 * int64_t{plan.n_blocks});
    workspace.records = layout.take(kSequenceRecordBytes * most_sequences);
    workspace.totals = layout.take(4 * 4);
  }
  workspace.bytes = layout.take(0);
  return workspace;
}

// Whether a part of a call should be smaller: its workspace is larger than small ones are, and than the tensors call
// for.
inline bool is_too_large(BwdPlan const& plan, Problem const& part) {
  constexpr int64_t kSmall = int64_t{64} << 20;
  constexpr int kFewSequences = 32;
  int64_t const q_bytes = int64_t{2} * part.len_q * part.heads_q * plan.head_dim;
  return part.batch > kFewSequences && plan.workspace.bytes > std::max(kSmall, 4 * q_bytes);
}

// Fills in the tiles and the workspace of a plan whose variant and shape are known. Without tiles there is none.
inline void lay_out(BwdPlan& plan, Problem const& problem, BwdMemory const& memory) {
  bool const reads = plan.variant.reads_sequences;
  int const block_m = memory.block_m, block_n = plan.shape.block_n;
  plan.row_tiles = reads ? most_row_tiles(problem, block_m) : num_row_tiles(problem, block_m);
  plan.key_tiles = reads ? most_key_tiles(problem, block_n) : num_key_tiles(problem, block_n);
  if (plan.row_tiles == 0 || plan.key_tiles == 0) return;
  int64_t const m_blocks = reads ? plan.row_tiles / problem.heads_q : num_tiles(problem.len_q, block_m, 1);
  int64_t const n_blocks = reads ? plan.key_tiles / problem.heads_kv : num_tiles(problem.len_k, block_n, 1);
  plan.m_blocks = static_cast<int>(m_blocks);
  plan.n_blocks = static_cast<int>(n_blocks);
  plan.workspace = bwd_workspace(plan, problem, memory);
}

// The same in as many parts as keep the workspace small.
inline void lay_out_in_parts(BwdPlan& plan, Problem const& problem, BwdMemory const& memory) {
  Problem part = problem;
  lay_out(plan, part, memory);
  while (problem.packed && is_too_large(plan, part)) {
    plan.parts *= 2;
    plan.sequences_per_part = part.batch = (problem.batch + plan.parts - 1) / plan.parts;
    lay_out(plan, part, memory);
  }
  plan.parts = plan.parts == 1 ? 1 : (problem.batch + part.batch - 1) / part.batch;  // the last ones might have none
}

// `ctas`: of the kernels, per tile.
inline void check_num_tiles(BwdPlan const& plan, Problem const& problem, int block_m, int ctas = 1) {
  check_row_tiles(problem, ctas * plan.row_tiles, block_m);
  check_key_tiles(problem, ctas * plan.key_tiles, plan.shape.block_n);
}

// Of the families that have a kernel for each: dense batches, or sequences read at run time, and either kind of scores.
inline Variant bwd_variant(Problem const& problem) {
  if (problem.has_mask()) return problem.modifies_scores() ? Variant::kMaskedModified : Variant::kMasked;
  if (problem.packed) return problem.modifies_scores() ? Variant::kModified : Variant::kPacked;
  return problem.modifies_scores() ? Variant::kDenseModified : Variant::kDense;
}

}  // namespace flash_cute
