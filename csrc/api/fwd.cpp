// The forward on CUDA: check, plan, allocate, launch. No state outlives a call, so that any number of threads, streams
// and graph captures may run at once.
#include "fwd.h"

#include "varlen.h"

#ifdef FLASH_CUTE_NO_CUDA

namespace flash_cute {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error("flash_cute: this build has no CUDA kernels (it was built with FLASH_CUTE_NO_CUDA)");
}

}  // namespace

FwdResult fwd_cuda(FwdArgs const&) { refuse(); }
FwdResult packed_fwd_cuda(FwdArgs const&, Problem const&, VarlenArgs const&) { refuse(); }

}  // namespace flash_cute

#else

#include "tile_mask.h"

namespace flash_cute {
namespace {

int32_t out_dtype(FwdArgs const& args) {
  return args.fp8 ? torch_dtype(parse_out_type(args.fp8->out_dtype)) : args.q.dtype;
}

// The results, and `out` as the kernel sees it.
struct Allocated {
  FwdResult result;
  TensorInfo out;
};

Allocated allocate(FwdArgs const& args, int64_t head_dim_v) {
  TensorInfo const& q = args.q;
  std::array<int64_t, 3> const lse_sizes{q.sizes[0], q.sizes[1], q.sizes[2]};
  Sizes const out_sizes{q.sizes[0], q.sizes[1], q.sizes[2], head_dim_v};
  Tensor out = empty_strided(out_sizes, out_strides(q, head_dim_v), out_dtype(args), q);
  TensorInfo const info = tensor_info("out", out.get());
  return {{.out = std::move(out),
           .lse = empty_strided(lse_sizes, contiguous_strides(lse_sizes), aoti_torch_dtype_float32(), q)},
          info};
}

// (rows, heads, head_dim_v) and (heads, rows).
Allocated allocate_packed(FwdArgs const& args, int64_t head_dim_v, PackedView& view) {
  TensorInfo const& q = args.q;
  std::array<int64_t, 2> const lse_sizes{q.sizes[1], q.sizes[2]};
  Tensor out = empty_strided<3>({q.sizes[2], q.sizes[1], head_dim_v}, packed_out_strides(q, head_dim_v),
                                out_dtype(args), q);
  TensorInfo const info = view.info(tensor_info("out", out.get()), 3);
  return {{.out = std::move(out),
           .lse = empty_strided(lse_sizes, contiguous_strides(lse_sizes), aoti_torch_dtype_float32(), q)},
          info};
}

void launch_fwd(FwdArgs const& args, Problem const& checked, VarlenArgs const* lengths, FwdDecision const& decision,
                TensorInfo const& result, AtenTensorHandle lse) {
  std::optional<Problem> masked;
  if (checked.has_mask()) masked = seen_by_kernels(checked);
  Problem const& problem = masked ? *masked : checked;
  Operand const q(args.q, decision.q, decision.padded_head_dim);
  Operand const k(args.k, decision.k, decision.padded_head_dim);
  Operand const v(args.v, decision.v, decision.padded_head_dim_v);
  Result const out(result, decision.out, decision.padded_head_dim_v);

  FwdPlan const& plan = decision.plan;
  FwdWorkspace const& offsets = plan.workspace;
  Workspace const workspace(offsets.bytes, args.q);
  FwdParams params{.q = q.data,
                   .k = k.data,
                   .v = v.data,
                   .out = out.data,
                   .lse = static_cast<float*>(mutable_data_pointer(lse)),
                   .ticket = workspace.part<int>(offsets.ticket),
                   .part_flags = workspace.part<int>(offsets.part_flags),
                   .parts = workspace.part<float>(offsets.parts),
                   .q_strides = q.strides,
                   .k_strides = k.strides,
                   .v_strides = v.strides,
                   .out_strides = out.strides,
                   .batch = problem.batch,
                   .heads_q = problem.heads_q,
                   .heads_kv = problem.heads_kv,
                   .len_q = problem.len_q,
                   .len_k = problem.len_k,
                   .head_dim = decision.padded_head_dim,
                   .band = problem.band,
                   .scale_log2 = make_scale_log2(problem),
                   .power_scale = power_of_two_from(make_scale_log2(problem)),
                   .order = plan.order,
                   .split = plan.split,
                   .draws_tiles = plan.draws_tiles,
                   .head_dim_v = decision.padded_head_dim_v,
                   .tile_heads = plan.tile_heads,
                   .sinks = make_sinks(args)};
  if (plan.variant.reads_sequences) {
    params.sequences = make_sequences(args, problem, masked ? nullptr : lengths);
    params.sequences.tiles_before = workspace.part<int>(offsets.tiles_before);
    params.score = make_score_terms(args, problem);
  }
  Fp8Terms const fp8 = args.fp8 ? make_fp8_terms(args, problem) : Fp8Terms{};
  if (args.fp8) params.fp8 = &fp8;
  cudaStream_t const stream = current_stream(args.q.device_index);
  if (masked) {
    params.sequences.shift = dense_shift(problem);
    if (problem.modifies_scores()) params.score = make_score_terms(args, problem);
    params.mask = launch_tile_mask(plan.mask, args, checked, lengths, workspace, decision.gpu, stream, params.ticket,
                                   offsets.zeroed);
  }
  check_cuda(decision.instance->launch(plan, params, stream), "launch the forward");
  out.finish();
}

}  // namespace

FwdResult fwd_cuda(FwdArgs const& args) {
  Problem const problem = check_fwd(args, /*on_cuda=*/true);
  FLASH_CUTE_CHECK(is_cuda(args.q), "q: expected a CUDA tensor, got ", device_name(args.q));
  FwdDecision const decision = plan_fwd(args, problem, device_gpu(args.q.device_index));

  CurrentDevice const device(args.q.device_index);
  auto [result, out] = allocate(args, problem.head_dim_v);
  if (decision.plan.ctas > 0) launch_fwd(args, problem, nullptr, decision, out, result.lse.get());
  return std::move(result);
}

FwdResult packed_fwd_cuda(FwdArgs const& args, Problem const& problem, VarlenArgs const& lengths) {
  FLASH_CUTE_CHECK(is_cuda(args.q), "q: expected a CUDA tensor, got ", device_name(args.q));
  FwdDecision const decision = plan_fwd(args, problem, device_gpu(args.q.device_index));

  CurrentDevice const device(args.q.device_index);
  PackedView view;
  auto [result, out] = allocate_packed(args, problem.head_dim_v, view);
  if (decision.plan.ctas > 0) launch_fwd(args, problem, &lengths, decision, out, result.lse.get());
  return std::move(result);
}

}  // namespace flash_cute

#endif  // FLASH_CUTE_NO_CUDA
