#include "planner_large.h"

#include "sm80/bwd_large/pair.h"
#include "sm80/bwd_large/tile.h"
#include "sm80/fwd_large/pair.h"
#include "sm80/fwd_large/tile.h"
#include "sm90/bwd_large/tile.h"
#include "sm90/fwd_large/tile.h"
#include "sm90/fwd_wide/tile.h"

namespace flash_cute {
namespace {

// Two kernels for each of the two tiles, for plain and for modified scores. All read the sequences at run time, and have
// two CTAs per row tile.
void plan_fwd_large_sm90(FwdPlan& plan, FwdArgs const& args, Problem const& problem, Gpu gpu) {
  bool const modified = problem.softcap > 0 || problem.has_alibi;
  plan.variant = modified ? Variant::kModified : Variant::kPacked;
  bool const wide = plan.head_dim <= sm90::fwd_wide::kMaxHeadDim;
  plan.shape = wide ? sm90::fwd_wide::kernel_shape() : sm90::fwd_large::kernel_shape();
  plan.column_parts = wide ? sm90::fwd_wide::kCtas : sm90::fwd_large::kCtas;
  plan.tile_heads = 1;
  int64_t const tiles = most_row_tiles(problem, plan.shape, args.sequences.has_value());
  check_num_tiles("q", tiles, plan.shape.block_m, "rows", args.q);
  int const slots = gpu.num_sms / plan.column_parts;
  plan.draws_tiles = tiles > slots;
  plan.ctas = plan.column_parts * std::min<int64_t>(tiles, slots);
  if (plan.draws_tiles) plan.workspace = {.zeroed = 4, .bytes = 4};
}

// Pairs of CTAs, where a gradient's columns are in two parts, and what they share.
void plan_bwd_pairs(BwdPlan& plan, int head_dim, int head_dim_v, Gpu gpu) {
  if (gpu.num_sms < 2) return;  // a partner that did not run would be waited for in vain
  int const parts = sm80::large::column_parts(head_dim), parts_of_dv = sm80::large::column_parts(head_dim_v);
  auto const pairs = [&](int64_t units) { return static_cast<int>(std::min<int64_t>(units, gpu.num_sms / 2)); };
  if (std::max(parts, parts_of_dv) == 2) {
    plan.key_pairs = pairs(sm80::bwd_large::units(plan.key_tiles, parts) +
                           sm80::bwd_large::units(plan.key_tiles, parts_of_dv));
    plan.ctas = 2 * plan.key_pairs;
  }
  if (parts == 2) {
    plan.row_pairs = pairs(plan.row_tiles);
    plan.dq_ctas = 2 * plan.row_pairs;
  }
  if (int const most = std::max(plan.key_pairs, plan.row_pairs); most > 0) {
    plan.workspace.pairs = plan.workspace.bytes;
    plan.workspace.bytes += sm80::bwd_large::pair_bytes(most);
  }
}

}  // namespace

// On sm80 one kernel serves every call: it reads the sequences, the mask and the terms of the score at run time.
void plan_fwd_large(FwdDecision& decision, FwdArgs const& args, Problem const& problem, Gpu gpu) {
  FwdPlan& plan = decision.plan;
  if (decision.backend == Backend::kSm90) return plan_fwd_large_sm90(plan, args, problem, gpu);
  bool const packed = args.sequences.has_value();
  plan.variant = Variant::kModified;
  plan.entry = sm80_entry(problem, gpu);
  plan.shape = sm80::fwd_large::kernel_shape(decision.padded_head_dim, plan.entry);
  plan.column_parts = sm80::large::column_parts(decision.padded_head_dim_v);
  plan.tile_heads = 1;
  int64_t const tiles = most_row_tiles(problem, plan.shape, packed);
  check_num_tiles("q", tiles, plan.shape.block_m, "rows", args.q);
  plan.ctas = tiles;
  if (tiles == 0) return;
  int const head_dim = (decision.padded_head_dim + decision.padded_head_dim_v) / 2;  // mean of K's and V's
  if (!packed) {
    plan.order = sm80::fwd::tile_order(plan.shape, /*masked=*/true, problem.batch, problem.heads_q, problem.heads_kv,
                                       problem.len_q, problem.len_k, head_dim);
  }
  int64_t const bytes_before = packed ? prefix_bytes(problem) : 0;
  plan.workspace.bytes = bytes_before;
  if (plan.column_parts == 2 && gpu.num_sms > 1) {  // a partner that did not run would be waited for in vain
    int64_t const pairs = std::min<int64_t>(tiles, gpu.num_sms / 2);
    plan.pairs_ctas = true;
    plan.row_tiles = tiles;
    plan.ctas = 2 * pairs;
    FwdWorkspace& workspace = plan.workspace;
    workspace.ticket = 0;
    workspace.part_flags = 128;
    workspace.zeroed = workspace.part_flags + pairs * sm80::large::kFlagBytesPerPair;
    workspace.parts = workspace.zeroed;
    workspace.tiles_before = workspace.parts + pairs * sm80::large::kMessageBytesPerPair<sm80::fwd_large::Message>;
    workspace.bytes = workspace.tiles_before + bytes_before;
  }
}

// The kernels of dK and dV and of dQ, which serve every call and are deterministic in either mode. On sm90 there are
// two of each, for plain and for modified scores, and a tile may have a cluster of CTAs.
void plan_bwd_large(BwdDecision& decision, FwdArgs const& call, Problem const& problem, int64_t scaled_rows, Gpu gpu) {
  BwdPlan& plan = decision.plan;
  bool const packed = call.sequences.has_value(), sm90 = decision.backend == Backend::kSm90;
  int const head_dim = decision.padded_head_dim, head_dim_v = decision.padded_head_dim_v;
  constexpr int kTile = sm80::bwd_large::kTileRows;
  static_assert(kTile == sm90::bwd_large::kTileRows);
  int ctas_per_tile = 1;
  if (sm90) {
    bool const modified = problem.softcap > 0 || problem.has_alibi;
    plan.variant = modified ? Variant::kModified : Variant::kPacked;
    plan.shape = sm90::bwd_large::kernel_shape(plan.head_dim);
    ctas_per_tile = sm90::bwd_large::ctas_per_tile(plan.head_dim);
  } else {
    plan.variant = Variant::kModified;
    plan.entry = sm80_entry(problem, gpu);
    plan.shape = sm80::bwd_large::kernel_shape(head_dim, head_dim_v, plan.entry);
  }
  plan.row_tiles = most_tiles(problem, problem.len_q, kTile, packed) * problem.heads_q;
  plan.key_tiles = most_tiles(problem, problem.len_k, kTile, packed) * problem.heads_kv;
  check_num_tiles("q", plan.row_tiles * ctas_per_tile, kTile, "rows", call.q);
  check_num_tiles("k", plan.key_tiles * ctas_per_tile, kTile, "keys", call.k);
  if (plan.row_tiles == 0 || plan.key_tiles == 0) return;
  plan.m_blocks = static_cast<int>(plan.row_tiles / problem.heads_q);
  plan.n_blocks = static_cast<int>(plan.key_tiles / problem.heads_kv);
  plan.ctas = ctas_per_tile * plan.key_tiles;
  plan.dq_ctas = ctas_per_tile * plan.row_tiles;
  plan.workspace = bwd_workspace(plan, problem, scaled_rows, head_dim_v, kTile, /*keeps_tickets=*/false,
                                 /*has_queue=*/false);
  if (!sm90) plan_bwd_pairs(plan, head_dim, head_dim_v, gpu);
}

}  // namespace flash_cute
