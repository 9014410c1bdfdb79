// The backward on CUDA: check, plan, allocate, launch. As in fwd.cpp, no state outlives a call: each has its own
// workspace tensor.
#include "bwd.h"

#include "varlen.h"

#ifdef FLASH_CUTE_NO_CUDA

namespace flash_cute {

namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error("flash_cute: this build has no CUDA kernels (it was built with FLASH_CUTE_NO_CUDA)");
}

}  // namespace

BwdResult bwd_cuda(BwdArgs const&) { refuse(); }
BwdResult packed_bwd_cuda(BwdArgs const&, Problem const&, VarlenArgs const&) { refuse(); }

}  // namespace flash_cute

#else

#include "tile_mask.h"

namespace flash_cute {
namespace {

// The gradients as the kernels see them: packed ones as a batch of one.
struct Gradients {
  TensorInfo dq;
  TensorInfo dk;
  TensorInfo dv;
};

// The sequences of a part of a packed call, from those of the part before or, of the first one, of the whole call.
void set_part(BwdParams& params, BwdPlan const& plan, int batch, int index) {
  int const step = index == 0 ? 0 : plan.sequences_per_part;
  Sequences& sequences = params.sequences;
  for (int const** lengths : {&sequences.cu_q, &sequences.cu_k, &sequences.used_q, &sequences.used_k}) {
    if (*lengths != nullptr) *lengths += step;
  }
  if (params.score.slopes != nullptr) params.score.slopes += step * params.score.slopes_batch_stride;
  if (params.sink_parts != nullptr && index > 0) params.sink_parts += plan.row_tiles;
  params.part = index;
  params.batch = std::min(plan.sequences_per_part, batch - index * plan.sequences_per_part);
  sequences.has_before = index > 0;
  sequences.has_behind = index < plan.parts - 1;
}

// Zeroes `number` rows of a dense tensor from `first` on.
void zero_rows(TensorInfo const& tensor, int64_t first, int64_t number) {
  if (number == 0) return;
  Sizes const sizes{tensor.sizes[0], tensor.sizes[1], number, tensor.sizes[3]};
  AtenTensorHandle rows = nullptr;
  check_shim(aoti_torch__reinterpret_tensor(tensor.handle, 4, sizes.data(), tensor.strides, first * tensor.strides[2],
                                            &rows),
             "take a view of a tensor");
  zero(Tensor(rows).get());
}

void launch_bwd(BwdArgs const& args, Problem const& checked, VarlenArgs const* lengths, BwdDecision const& decision,
                Gradients const& gradients, Tensor const& dsinks) {
  std::optional<Problem> masked;
  if (checked.has_mask()) masked = seen_by_kernels(checked);
  Problem const& problem = masked ? *masked : checked;
  int const head_dim = decision.padded_head_dim, head_dim_v = decision.padded_head_dim_v;
  Operand const q(args.call.q, decision.q, head_dim);
  Operand const k(args.call.k, decision.k, head_dim);
  Operand const v(args.call.v, decision.v, head_dim_v);
  Operand const out(args.out, decision.out, head_dim_v);
  Operand const dout(args.dout, decision.dout, head_dim_v);
  RowOperand const lse(args.lse);
  std::optional<RowOperand> dlse;
  if (args.dlse) dlse.emplace(*args.dlse);
  Result const dq(gradients.dq, decision.dq, head_dim);
  Result const dk(gradients.dk, decision.dk, head_dim);
  Result const dv(gradients.dv, decision.dv, head_dim_v);

  BwdPlan const& plan = decision.plan;
  BwdWorkspace const& offsets = plan.workspace;
  Workspace const workspace(offsets.bytes, args.call.q);
  bool const has_sinks = problem.has_sinks;
  // Of q, out, dout and dq the rows that see a key.
  int64_t const first_row = decision.rows.first;
  auto const from_first_row = [&](void const* data, Strides const& strides) {
    return static_cast<char*>(const_cast<void*>(data)) + 2 * first_row * strides.row;
  };
  Sequences sequences = make_sequences(args.call, problem, masked ? nullptr : lengths);
  sequences.shift += decision.rows.first;
  BwdParams params{.q = from_first_row(q.data, q.strides),
                         .k = k.data,
                         .v = v.data,
                         .out = from_first_row(out.data, out.strides),
                         .dout = from_first_row(dout.data, dout.strides),
                         .lse = lse.data + first_row,
                         .dlse = dlse ? dlse->data + first_row : nullptr,
                         .dq = from_first_row(dq.data, dq.strides),
                         .dk = dk.data,
                         .dv = dv.data,
                         .dsinks = has_sinks ? mutable_data_pointer(dsinks.get()) : nullptr,
                         .dq_acc = workspace.part<float>(offsets.dq_acc),
                         .lse_log2 = workspace.part<float>(offsets.lse_log2),
                         .delta = workspace.part<float>(offsets.delta),
                         .sink_parts = workspace.part<float>(offsets.sink_parts),
                         .scaled_dout = workspace.part<void>(offsets.scaled_dout),
                         .semaphores = workspace.part<int>(offsets.semaphores),
                         .counters = workspace.part<int>(offsets.counters),
                         .dq_queue = workspace.part<int>(offsets.dq_queue),
                         .drawn = workspace.part<int>(offsets.drawn),
                         .q_strides = q.strides,
                         .k_strides = k.strides,
                         .v_strides = v.strides,
                         .out_strides = out.strides,
                         .dout_strides = dout.strides,
                         .dq_strides = dq.strides,
                         .dk_strides = dk.strides,
                         .dv_strides = dv.strides,
                         .batch = problem.batch,
                         .heads_q = problem.heads_q,
                         .heads_kv = problem.heads_kv,
                         .len_q = decision.rows.number,
                         .len_k = problem.len_k,
                         .lse_rows = problem.len_q,
                         .head_dim = head_dim,
                         .band = decision.band,
                         .scale = static_cast<float>(problem.scale),
                         .scale_log2 = make_scale_log2(problem),
                         .deterministic = args.deterministic,
                         .m_blocks = plan.m_blocks,
                         .n_blocks = plan.n_blocks,
                         .heads_per_kv = problem.heads_q / problem.heads_kv,
                         .launch_order = plan.launch_order,
                         .task_order = plan.task_order,
                         .split = plan.split,
                         .head_dim_v = head_dim_v,
                         .sinks = make_sinks(args.call),
                         .sequences = sequences,
                         .tiles = {.row_sequence = workspace.part<int>(offsets.row_sequence),
                                   .key_sequence = workspace.part<int>(offsets.key_sequence),
                                   .records = workspace.part<SequenceRecord>(offsets.records),
                                   .totals = workspace.part<int>(offsets.totals)},
                         .score = make_score_terms(args.call, problem),
                         .pairs = workspace.part<void>(offsets.pairs)};
  cudaStream_t const stream = current_stream(args.call.q.device_index);
  if (masked) {
    params.mask = launch_tile_mask(plan.mask, args.call, checked, lengths, workspace, decision.gpu, stream);
  }
  for (int index = 0; index < plan.parts; ++index) {
    if (plan.parts > 1) set_part(params, plan, problem.batch, index);
    check_cuda(decision.instance->launch(plan, params, stream), "launch the backward");
  }
  for (Result const* gradient : {&dq, &dk, &dv}) gradient->finish();
  int64_t const end_row = first_row + decision.rows.number;
  zero_rows(gradients.dq, 0, first_row);
  zero_rows(gradients.dq, end_row, problem.len_q - end_row);
}

BwdDecision plan_call(BwdArgs const& args, Problem const& problem) {
  FwdArgs const& call = args.call;
  FLASH_CUTE_CHECK(is_cuda(call.q), "q: expected a CUDA tensor, got ", device_name(call.q));
  return plan_bwd(call, &args.dout, &args.out, problem, device_gpu(call.q.device_index));
}

// (heads_q,) in the sinks' dtype; (0,) without sinks.
Tensor allocate_dsinks(FwdArgs const& call) {
  std::array<int64_t, 1> const sizes{call.sinks ? call.sinks->sizes[0] : 0};
  return empty_strided(sizes, {1}, call.sinks ? call.sinks->dtype : aoti_torch_dtype_float32(), call.q);
}

BwdResult run(BwdArgs const& args, Problem const& problem, VarlenArgs const* lengths, BwdDecision const& decision,
              BwdResult result, Gradients const& gradients) {
  if (decision.plan.workspace.bytes > 0) {
    launch_bwd(args, problem, lengths, decision, gradients, result.dsinks);
  } else {  // no keys, no rows or no heads: all gradients are 0
    for (Tensor const* gradient : {&result.dq, &result.dk, &result.dv, &result.dsinks}) zero(gradient->get());
  }
  return result;
}

// An output like a packed tensor.
Tensor empty_like_packed(TensorInfo const& like) {
  std::array<int64_t, 3> const sizes{like.sizes[2], like.sizes[1], like.sizes[3]};
  return empty_strided(sizes, packed_out_strides(like, like.sizes[3]), like.dtype, like);
}

}  // namespace

BwdResult bwd_cuda(BwdArgs const& args) {
  Problem const problem = check_bwd(args, /*on_cuda=*/true);
  FwdArgs const& call = args.call;
  BwdDecision const decision = plan_call(args, problem);

  CurrentDevice const device(call.q.device_index);
  BwdResult result{.dq = empty_like(call.q),
                   .dk = empty_like(call.k),
                   .dv = empty_like(call.v),
                   .dsinks = allocate_dsinks(call)};
  Gradients const gradients{.dq = tensor_info("dq", result.dq.get()),
                            .dk = tensor_info("dk", result.dk.get()),
                            .dv = tensor_info("dv", result.dv.get())};
  return run(args, problem, nullptr, decision, std::move(result), gradients);
}

BwdResult packed_bwd_cuda(BwdArgs const& args, Problem const& problem, VarlenArgs const& lengths) {
  FwdArgs const& call = args.call;
  BwdDecision const decision = plan_call(args, problem);

  CurrentDevice const device(call.q.device_index);
  BwdResult result{.dq = empty_like_packed(call.q),
                   .dk = empty_like_packed(call.k),
                   .dv = empty_like_packed(call.v),
                   .dsinks = allocate_dsinks(call)};
  PackedView dq, dk, dv;
  Gradients const gradients{.dq = dq.info(tensor_info("dq", result.dq.get()), 3),
                            .dk = dk.info(tensor_info("dk", result.dk.get()), 3),
                            .dv = dv.info(tensor_info("dv", result.dv.get()), 3)};
  return run(args, problem, &lengths, decision, std::move(result), gradients);
}

}  // namespace flash_cute

#endif  // FLASH_CUTE_NO_CUDA
