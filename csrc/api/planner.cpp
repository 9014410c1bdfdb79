#include "planner.h"

#include "choice.h"
#include "planner_large.h"
#include "tuning.h"

namespace flash_cute {
namespace {

// Keys per row, or rows per key, if the band limits both sides; else INT_MAX, more than any length.
int64_t band_width(Band const& band) {
  return band.has_lower() && band.has_upper() ? int64_t{band.upper} - band.lower + 1 : INT_MAX;
}

// The query rows that the longest key tile visits, of one query head.
int64_t longest_rows(Problem const& problem, KernelShape const& shape) {
  return std::min<int64_t>(problem.len_q, band_width(problem.band) + shape.block_n);
}

// The tile, and whether tiles are split, is the choice's.
void plan_fwd_sm90(FwdPlan& plan, Problem const& problem, Gpu gpu) {
  plan.entry = problem.forced_entry;
  plan.shape = sm90::fwd::kernel_shape(plan.head_dim, plan.entry, plan.head_dim_v);
  int64_t const tiles = num_row_tiles(problem, plan.shape);
  plan.draws_tiles = is_masked(problem) && fwd_draws(problem, plan.shape, /*packed=*/false, gpu);
  if (problem.forced_split == 1) plan.split = fwd_split(problem, plan.shape, gpu);
  bool const only_split = plan.split.tiles > 0 && plan.split.tiles == tiles;
  plan.ctas = only_split ? plan.split.ranges : std::min<int64_t>(tiles, gpu.num_sms);
  if (!plan.draws_tiles && plan.split.tiles == 0) return;
  int64_t const flags = 4 * sm90::fwd::part_flags(plan.shape, plan.split);
  plan.workspace = {
      .ticket = 0, .part_flags = 4, .parts = aligned(4 + flags), .tiles_before = 0, .zeroed = 4 + flags, .bytes = 0};
  plan.workspace.bytes = plan.workspace.parts + sm90::fwd::parts_bytes(plan.shape, plan.head_dim_v, plan.split);
}

// A kernel that reads the sequences at run time, also where the batch is dense.
void plan_fwd_of_sequences(FwdDecision& decision, FwdArgs const& args, Problem const& problem, Gpu gpu) {
  FwdPlan& plan = decision.plan;
  bool const sm90 = decision.backend == Backend::kSm90, packed = args.sequences.has_value();
  if (sm90) {
    plan.entry = problem.forced_entry;
    plan.shape = sm90::fwd::kernel_shape(plan.head_dim, plan.entry, plan.head_dim_v);
  } else {
    plan.entry = sm80_entry(problem, gpu);
    plan.shape = plan.accumulate == Accumulate::kFloat32
                     ? sm80::fwd::kernel_shape(plan.head_dim, plan.entry, plan.variant)
                     : sm80::fwd::float16_kernel_shape(plan.head_dim, plan.entry);
  }
  int64_t const tiles = most_row_tiles(problem, plan.shape, packed);
  check_num_tiles("q", tiles, plan.shape.block_m, "rows", args.q);
  if (tiles == 0) return;  // perhaps there is no head, and no order of tiles then
  if (!sm90 && !packed) {
    plan.order = sm80::fwd::tile_order(plan.shape, /*masked=*/true, problem.batch, problem.heads_q, problem.heads_kv,
                                       problem.len_q, problem.len_k, decision.padded_head_dim);
  }
  plan.draws_tiles = sm90 && tiles > gpu.num_sms && fwd_draws(problem, plan.shape, packed, gpu);
  plan.ctas = sm90 ? std::min<int64_t>(tiles, gpu.num_sms) : tiles;
  if (plan.draws_tiles) {
    plan.workspace = {.ticket = 0, .part_flags = 0, .parts = 0, .tiles_before = 0, .zeroed = 4, .bytes = 4};
  } else if (!sm90 && packed && problem.batch + 2 > sm80::fwd::kMostSearchedSequences) {
    plan.workspace.bytes = prefix_bytes(problem);
  }
}

void order_sm90(BwdPlan& plan, Problem const& problem, Gpu gpu, TensorInfo const& q) {
  bool const masked = is_masked(problem);
  int64_t visited = (longest_rows(problem, plan.shape) + plan.shape.block_m - 1) / plan.shape.block_m;
  // Where a window limits the rows of a key tile, few heads at a time keep Q, dO and dQ in L2.
  if (problem.band.has_lower()) visited *= problem.heads_q / problem.heads_kv;
  sm90::bwd::TileCounts const counts{.m_blocks = plan.m_blocks,
                                     .n_blocks = plan.n_blocks,
                                     .heads_per_kv = problem.heads_q / problem.heads_kv,
                                     .heads = int64_t{problem.batch} * problem.heads_kv,
                                     .visited_rows = static_cast<int>(visited)};
  plan.task_order = sm90::bwd::task_order(counts, masked, plan.deterministic, gpu.num_sms);
  FLASH_CUTE_CHECK(plan.task_order.num_tasks > 0,
                   "q: expected fewer tiles of work, of which there are at most 2^31 - 1; got ", shape_text(q));
  if (problem.forced_split != 0) {
    plan.split =
        sm90::bwd::split_key_tiles(plan.task_order, counts, plan.shape, masked, plan.deterministic, gpu.num_sms);
  }
  plan.ctas = std::min<int64_t>(plan.task_order.num_tasks, gpu.num_sms);
}

// The sm80 backward has one head dim: where v has its own, the tensors of the smaller one are padded by copies.
void pad_to_one_head_dim(BwdDecision& decision) {
  int const head_dim = std::max(decision.padded_head_dim, decision.padded_head_dim_v);
  if (decision.padded_head_dim < head_dim) {
    decision.q = decision.k = decision.dq = decision.dk = Copy::kHeadDimPadded;
  }
  if (decision.padded_head_dim_v < head_dim) {
    decision.v = decision.out = decision.dout = decision.dv = Copy::kHeadDimPadded;
  }
  decision.padded_head_dim = decision.padded_head_dim_v = head_dim;
}

// Leaves out the rows of a dense batch that see no key: they are at both ends.
SeeingRows drop_blind_rows(Problem& problem) {
  Band& band = problem.band;
  int const first = band.has_upper() ? std::max(0, -band.upper) : 0;
  int64_t const limit = band.has_lower() ? std::clamp<int64_t>(int64_t{problem.len_k} - band.lower, 0, problem.len_q)
                                         : problem.len_q;
  bool const some = problem.len_k > 0 && first < limit;
  problem.len_q = some ? static_cast<int>(limit - first) : 0;
  if (!some) return {};
  if (band.has_lower()) band.lower += first;
  if (band.has_upper()) band.upper += first;
  return {.first = first, .number = problem.len_q};
}

// Whether a part of a call should be smaller: its workspace is larger than small ones are, and than the tensors call for.
bool is_too_large(BwdPlan const& plan, Problem const& part) {
  constexpr int64_t kSmall = int64_t{64} << 20;
  constexpr int kFewSequences = 32;
  int64_t const q_bytes = int64_t{2} * part.len_q * part.heads_q * plan.head_dim;
  return part.batch > kFewSequences && plan.workspace.bytes > std::max(kSmall, 4 * q_bytes);
}

}  // namespace

int64_t prefix_bytes(Problem const& problem) { return 4 * (3 * (int64_t{problem.batch} + 2) + 1); }

int64_t scaled_rows(Problem const& asked, bool packed) {
  return int64_t{packed ? 1 : asked.batch} * asked.heads_q * asked.len_q;
}

BwdWorkspace bwd_workspace(BwdPlan const& plan, Problem const& problem, int64_t all_rows, int padded_head_dim_v,
                           int block_m, bool keeps_tickets, bool has_queue) {
  int64_t const rows = plan.row_tiles * block_m;
  bool const sums = !plan.shape.dq_in_registers;
  BwdWorkspace workspace{};
  workspace.lse_log2 = workspace.dq_acc + (sums ? aligned(4 * rows * plan.head_dim) : 0);
  workspace.delta = workspace.lse_log2 + aligned(4 * rows);
  workspace.semaphores = workspace.delta + aligned(4 * rows);
  workspace.counters = workspace.semaphores + (sums ? 4 * plan.row_tiles : 0);
  int64_t const heads = int64_t{problem.batch} * problem.heads_q;
  int64_t const counters = std::max<int64_t>(1 + heads, 4);  // see DqQueue
  workspace.drawn = workspace.counters + (sums ? aligned(4 * counters) : 0);
  workspace.sink_parts = workspace.drawn + (keeps_tickets ? aligned(4 * plan.key_tiles) : 0);
  workspace.scaled_dout = aligned(workspace.sink_parts + (problem.has_sinks ? 4 * plan.row_tiles * plan.parts : 0));
  workspace.dq_queue = workspace.scaled_dout + (plan.scales_dout ? aligned(2 * all_rows * padded_head_dim_v) : 0);
  workspace.row_sequence = workspace.dq_queue + (has_queue ? aligned(2 * 4 * plan.row_tiles) : 0);
  workspace.bytes = workspace.row_sequence;
  if (!reads_sequences(plan.variant)) return workspace;
  workspace.key_sequence = workspace.row_sequence + aligned(4 * int64_t{plan.m_blocks});
  workspace.records = workspace.key_sequence + aligned(4 * int64_t{plan.n_blocks});
  int64_t const most_sequences = int64_t{problem.batch} + 2;  // see sequence_count
  workspace.totals = workspace.records + aligned(kSequenceRecordBytes * most_sequences);
  workspace.bytes = workspace.totals + aligned(4 * 4);
  return workspace;
}

int64_t most_row_tiles(Problem const& problem, KernelShape const& shape, bool packed) {
  return most_tiles(problem, problem.len_q, shape.block_m, packed) * problem.heads_q;
}

FwdDecision plan_fwd(FwdArgs const& args, Problem const& asked, Gpu gpu) {
  auto [problem, tuned] = tune_problem(kFwdKernels, args, asked, /*deterministic=*/false, gpu);
  bool const packed = args.sequences.has_value();
  Predicted const predicted = choose_fwd(problem, packed, gpu);
  auto decision = decide<FwdDecision>(kFwdKernels, args, problem, gpu);
  decision.tuned = tuned;
  decision.predicted = predicted;
  decision.out = out_copy(args.q, problem.head_dim_v);
  FwdPlan& plan = decision.plan;
  bool const sm90 = decision.backend == Backend::kSm90;
  plan.head_dim_v = decision.instance.head_dim_v;
  if (is_large(decision)) {
    plan_fwd_large(decision, args, problem, gpu);
    return decision;
  }
  plan.variant = fwd_variant(problem, decision.instance, packed);
  plan.accumulate = problem.accumulate;
  if (reads_sequences(plan.variant)) {
    plan_fwd_of_sequences(decision, args, problem, gpu);
    return decision;
  }
  if (sm90) {
    plan_fwd_sm90(plan, problem, gpu);
  } else {
    plan.entry = sm80_entry(problem, gpu);
    plan.shape = sm80::fwd::kernel_shape(plan.head_dim, plan.entry);
    plan.ctas = num_row_tiles(problem, plan.shape);
  }
  int64_t const tiles = num_row_tiles(problem, plan.shape);
  check_num_tiles("q", tiles, plan.shape.block_m, "rows", args.q);
  if (tiles == 0) return decision;
  auto const& [batch, heads_q, heads_kv, len_q, len_k] =
      std::array{problem.batch, problem.heads_q, problem.heads_kv, problem.len_q, problem.len_k};
  int const head_dim = (decision.padded_head_dim + decision.padded_head_dim_v) / 2;  // mean of K's and V's
  bool const masked = is_masked(problem);
  plan.tile_heads = sm90 ? fwd_tile_heads(problem, plan.shape) : 1;
  plan.order = sm90 ? sm90::fwd::tile_order(plan.shape, masked, batch, heads_q, heads_kv, len_q, len_k, head_dim,
                                            gpu.num_sms, plan.tile_heads)
                    : sm80::fwd::tile_order(plan.shape, masked, batch, heads_q, heads_kv, len_q, len_k, head_dim);
  return decision;
}

BwdDecision plan_bwd(FwdArgs const& call, TensorInfo const* dout, TensorInfo const* out, bool deterministic,
                     bool has_dlse, Problem const& asked, Gpu gpu) {
  auto [problem, tuned] = tune_problem(kBwdKernels, call, asked, deterministic, gpu);
  bool const packed = call.sequences.has_value();
  SeeingRows const rows = packed ? SeeingRows{.first = 0, .number = problem.len_q} : drop_blind_rows(problem);
  Predicted const predicted = choose_bwd(problem, packed, deterministic, gpu);
  auto decision = decide<BwdDecision>(kBwdKernels, call, problem, gpu);
  decision.rows = rows;
  decision.band = problem.band;
  decision.tuned = tuned;
  decision.predicted = predicted;
  check_accumulate_of_bwd(problem);
  decision.dout = dout ? read_copy(*dout) : out_copy(call.q, problem.head_dim_v);
  decision.out = out ? read_copy(*out) : out_copy(call.q, problem.head_dim_v);
  decision.dq = write_copy(call.q);
  decision.dk = write_copy(call.k);
  decision.dv = write_copy(call.v);
  BwdPlan& plan = decision.plan;
  plan.head_dim_v = decision.instance.head_dim_v;
  plan.deterministic = deterministic;
  plan.parts = 1;
  plan.sequences_per_part = problem.batch;
  bool const has_sinks_and_dlse = problem.has_sinks && has_dlse;
  plan.scales_dout = has_sinks_and_dlse && plan.dtype == DType::kFloat16;
  if (is_large(decision)) {
    plan_bwd_large(decision, call, problem, scaled_rows(asked, packed), gpu);
    return decision;
  }
  bool const sm90 = decision.backend == Backend::kSm90;
  plan.variant = problem.softcap > 0 || problem.has_alibi ? Variant::kModified
                 : packed                                 ? Variant::kPacked
                                                          : Variant::kDense;
  if (sm90 && !packed && plan.variant == Variant::kModified) plan.variant = Variant::kDenseModified;
  bool const reads = reads_sequences(plan.variant);
  bool const bfloat16 = plan.dtype == DType::kBFloat16;
  bool const wide = !sm90::bwd::serves(plan.head_dim, plan.head_dim_v, plan.variant, bfloat16);  // of the sm90 kernels
  if (!sm90) {
    plan.entry = sm80_entry(problem, gpu);
    pad_to_one_head_dim(decision);
  } else if (!wide && sm90::bwd::is_mla(plan.head_dim, plan.head_dim_v)) {
    plan.scales_dout = has_sinks_and_dlse;  // its dS is made from P in float16, whatever the dtype
  }
  plan.shape = !sm90  ? sm80::bwd::kernel_shape(plan.head_dim, plan.entry, plan.variant)
               : wide ? sm90::bwd_wide::kernel_shape(plan.head_dim, plan.head_dim_v)
                      : sm90::bwd::kernel_shape(plan.head_dim, plan.head_dim_v, plan.variant);
  int const listed_rows = wide && reads && sm90 ? sm90::bwd_wide::kQueryTileRows : plan.shape.block_m;
  auto const lay_out = [&](Problem const& part) {
    plan.row_tiles = reads ? most_tiles(part, part.len_q, listed_rows, packed) * part.heads_q
                           : num_row_tiles(part, plan.shape);
    plan.key_tiles = reads ? most_tiles(part, part.len_k, plan.shape.block_n, packed) * part.heads_kv
                           : num_key_tiles(part, plan.shape);
    if (plan.row_tiles == 0 || plan.key_tiles == 0) return;
    plan.m_blocks = static_cast<int>(reads ? plan.row_tiles / part.heads_q
                                           : num_tiles(part.len_q, plan.shape.block_m, 1));
    plan.n_blocks = static_cast<int>(reads ? plan.key_tiles / part.heads_kv
                                           : num_tiles(part.len_k, plan.shape.block_n, 1));
    plan.workspace = bwd_workspace(plan, part, scaled_rows(asked, packed), decision.padded_head_dim_v, listed_rows,
                                   /*keeps_tickets=*/!sm90 && !reads && deterministic,
                                   /*has_queue=*/sm90 && !wide && reads);
  };
  Problem part = problem;
  lay_out(part);
  while (packed && is_too_large(plan, part)) {
    plan.parts *= 2;
    plan.sequences_per_part = part.batch = (problem.batch + plan.parts - 1) / plan.parts;
    lay_out(part);
  }
  plan.parts = plan.parts == 1 ? 1 : (problem.batch + part.batch - 1) / part.batch;  // the last ones might have none
  check_num_tiles("q", plan.row_tiles, plan.shape.block_m, "rows", call.q);
  check_num_tiles("k", plan.key_tiles, plan.shape.block_n, "keys", call.k);
  if (plan.row_tiles == 0 || plan.key_tiles == 0) return decision;
  if (reads) {
    plan.ctas = sm90 && !wide ? std::min<int64_t>(plan.key_tiles, gpu.num_sms) : plan.key_tiles;
    // The tasks of sm90/bwd convert the sums themselves, see dq_queue.cuh there.
    plan.dq_ctas = !sm90 || wide ? plan.row_tiles : 0;
  } else if (sm90 && !wide) {
    order_sm90(plan, problem, gpu, call.q);
  } else {
    int64_t const heads_q = int64_t{problem.batch} * problem.heads_q;
    plan.ctas = plan.key_tiles;
    plan.dq_ctas = sm90 ? num_tiles(problem.len_q, sm90::bwd_wide::kQueryTileRows, heads_q) : plan.row_tiles;
  }
  if (!sm90 && !reads) {
    int const group = problem.heads_q / problem.heads_kv;
    int64_t const rows = num_tiles(static_cast<int>(longest_rows(problem, plan.shape)), plan.shape.block_m, 1) *
                         plan.shape.block_m * group;
    plan.launch_order =
        sm80::bwd::launch_order(plan.head_dim, plan.shape, is_masked(problem), deterministic, rows, group,
                                plan.n_blocks, problem.batch * problem.heads_kv, gpu.num_sms);
  }
  return decision;
}

}  // namespace flash_cute
