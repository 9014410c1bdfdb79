// What a mask takes of a plan: its lists, and their place in the workspace.
#pragma once

#include <climits>

#include "check.h"
#include "contract/plan.h"
#include "problem.h"
#include "workspace.h"

namespace flash_cute {

// Fills in the plan of a mask, whose units and lists the family has chosen, behind `bytes` of a workspace. Returns the
// bytes of both.
inline int64_t lay_out_mask(TileMaskPlan& plan, Problem const& problem, int64_t bytes) {
  plan.batches = problem.mask_batches;
  plan.heads = problem.mask_heads;
  plan.row_units = (problem.len_q + plan.unit_rows - 1) / plan.unit_rows;
  plan.key_tiles = static_cast<int>((int64_t{problem.len_k} + plan.block_n - 1) / plan.block_n);
  int64_t const pairs = int64_t{plan.batches} * plan.heads;
  int64_t const row_lists = 4 * pairs * plan.row_units * plan.key_words();
  int64_t const key_lists = 4 * pairs * plan.key_tiles * plan.row_words();
  FLASH_CUTE_CHECK(pairs * plan.key_words() * plan.row_words() <= INT_MAX,
                   "mask: expected fewer batches, heads, rows and keys, got ", plan.batches, ", ", plan.heads, ", ",
                   problem.len_q, " and ", problem.len_k);
  WorkspaceLayout layout(bytes);
  if (problem.mask_matrix) {
    int64_t const blocks = pairs * ((problem.len_q + kBitRows - 1) / kBitRows);
    plan.bits = layout.take(blocks * plan.columns() * int64_t{sizeof(RowBits)});
    plan.tile_rows = layout.take(blocks * plan.key_tiles * int64_t{sizeof(TileRows)});
  } else {
    plan.intervals = layout.take(pairs * plan.columns() * problem.mask_intervals * int64_t{sizeof(RowInterval)});
  }
  plan.rows_visited = layout.take(row_lists);
  plan.rows_whole = layout.take(row_lists);
  if (plan.lists_keys) {
    plan.keys_visited = layout.take(key_lists);
    plan.keys_whole = layout.take(key_lists);
  }
  if (plan.tile_units > 0 && plan.row_tiles() > TileMaskPlan::kMostSorted) plan.tile_units = 0;
  if (plan.tile_units > 0) plan.row_order = layout.take(4 * pairs * plan.row_tiles());
  return layout.bytes();
}

}  // namespace flash_cute
