// The backward on CUDA: check, plan, allocate, launch. As in fwd.cpp, no state outlives a call: each has its own
// workspace tensor.
#include "bwd.h"

#ifdef FLASH_CUTE_NO_CUDA

namespace flash_cute {

BwdResult bwd_cuda(BwdArgs const&) {
  throw std::runtime_error("flash_cute: this build has no CUDA kernels (it was built with FLASH_CUTE_NO_CUDA)");
}

}  // namespace flash_cute

#else

#include "operand.h"

namespace flash_cute {
namespace {

void launch_bwd(BwdArgs const& args, Problem const& problem, BwdDecision const& decision, BwdResult const& result) {
  int const head_dim = decision.padded_head_dim;
  Operand const q(args.call.q, decision.q, head_dim);
  Operand const k(args.call.k, decision.k, head_dim);
  Operand const v(args.call.v, decision.v, head_dim);
  Operand const out(args.out, decision.out, head_dim);
  Operand const dout(args.dout, decision.dout, head_dim);
  RowOperand const lse(args.lse);
  std::optional<RowOperand> dlse;
  if (args.dlse) dlse.emplace(*args.dlse);
  Result const dq(tensor_info("dq", result.dq.get()), decision.dq, head_dim);
  Result const dk(tensor_info("dk", result.dk.get()), decision.dk, head_dim);
  Result const dv(tensor_info("dv", result.dv.get()), decision.dv, head_dim);

  BwdPlan const& plan = decision.plan;
  BwdWorkspace const& offsets = plan.workspace;
  Tensor const workspace = empty_strided<1>({offsets.bytes}, {1}, aoti_torch_dtype_uint8(), args.call.q);
  auto const part = [bytes = static_cast<char*>(mutable_data_pointer(workspace.get()))](int64_t offset) {
    return static_cast<void*>(bytes + offset);
  };

  bool const dq_in_memory = !plan.shape.dq_in_registers;
  bool const draws = offsets.bytes > offsets.drawn;
  BwdParams const params{.q = q.data,
                         .k = k.data,
                         .v = v.data,
                         .out = out.data,
                         .dout = dout.data,
                         .lse = lse.data,
                         .dlse = dlse ? dlse->data : nullptr,
                         .dq = dq.data,
                         .dk = dk.data,
                         .dv = dv.data,
                         .dq_acc = dq_in_memory ? static_cast<float*>(part(offsets.dq_acc)) : nullptr,
                         .lse_log2 = static_cast<float*>(part(offsets.lse_log2)),
                         .delta = static_cast<float*>(part(offsets.delta)),
                         .semaphores = dq_in_memory ? static_cast<int*>(part(offsets.semaphores)) : nullptr,
                         .counters = dq_in_memory ? static_cast<int*>(part(offsets.counters)) : nullptr,
                         .drawn = draws ? static_cast<int*>(part(offsets.drawn)) : nullptr,
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
                         .len_q = problem.len_q,
                         .len_k = problem.len_k,
                         .head_dim = head_dim,
                         .band = problem.band,
                         .scale = static_cast<float>(problem.scale),
                         .scale_log2 = static_cast<float>(problem.scale * kLog2E),
                         .deterministic = args.deterministic,
                         .m_blocks = plan.m_blocks,
                         .n_blocks = plan.n_blocks,
                         .group = problem.heads_q / problem.heads_kv,
                         .launch_order = plan.launch_order,
                         .task_order = plan.task_order,
                         .split = plan.split};
  check_cuda(decision.instance.launch(plan, params, current_stream(args.call.q.device_index)),
             "launch the backward");
  for (Result const* gradient : {&dq, &dk, &dv}) gradient->finish();
}

}  // namespace

BwdResult bwd_cuda(BwdArgs const& args) {
  Problem const problem = check_bwd(args, /*on_cuda=*/true);
  FwdArgs const& call = args.call;
  FLASH_CUTE_CHECK(is_cuda(call.q), "q: expected a CUDA tensor, got ", device_name(call.q));
  BwdDecision const decision =
      plan_bwd(call, &args.dout, &args.out, args.deterministic, problem, device_gpu(call.q.device_index));

  CurrentDevice const device(call.q.device_index);
  std::array<int64_t, 1> const sinks{call.sinks ? call.sinks->sizes[0] : 0};
  int32_t const sinks_dtype = call.sinks ? call.sinks->dtype : aoti_torch_dtype_float32();
  BwdResult result{.dq = empty_like(call.q),
                   .dk = empty_like(call.k),
                   .dv = empty_like(call.v),
                   .dsinks = empty_strided(sinks, {1}, sinks_dtype, call.q)};
  if (decision.plan.workspace.bytes > 0) {
    launch_bwd(args, problem, decision, result);
  } else {  // no keys, no rows or no heads: all gradients are 0
    for (Tensor const* gradient : {&result.dq, &result.dk, &result.dv, &result.dsinks}) zero(gradient->get());
  }
  return result;
}

}  // namespace flash_cute

#endif  // FLASH_CUTE_NO_CUDA
