// The operators of packed sequences and their schemas; those of dense calls are in ops.cpp.
//
//   varlen_fwd, _varlen_fwd, varlen_fwd_plan, check_varlen_fwd   as fwd, _fwd, fwd_plan and check_fwd
//   varlen_bwd, _varlen_bwd, varlen_bwd_plan, check_varlen_bwd   as bwd, _bwd, bwd_plan and check_bwd
//
// The lengths, of which the host reads only shapes and dtypes: varlen.h. CPU kernels are registered from Python.
#include "fwd_stack.h"

namespace flash_cute {
namespace {

class VarlenBwdStack {
 public:
  explicit VarlenBwdStack(StackReader& stack)
      : dout_(stack.tensor()),
        q_(stack.tensor()),
        k_(stack.tensor()),
        v_(stack.tensor()),
        out_(stack.tensor()),
        lse_(stack.tensor()),
        dlse_(stack.optional_tensor()),
        lengths_(stack),
        score_(stack),
        deterministic_(stack.value<bool>()),
        backend_(stack.string()) {}

  VarlenBwdArgs args() {
    VarlenArgs const lengths = lengths_.args();
    std::optional<TensorInfo> dlse = optional_info("dlse", dlse_);
    if (dlse) dlse = dlse_view_.info(*dlse, 2);
    return {.bwd = {.call = pack(score_.args(q_, k_, v_, backend_), lengths, views_),
                    .dout = dout_view_.info(tensor_info("dout", dout_.get()), 3),
                    .out = out_view_.info(tensor_info("out", out_.get()), 3),
                    .lse = lse_view_.info(tensor_info("lse", lse_.get()), 2),
                    .dlse = dlse,
                    .deterministic = deterministic_},
            .lengths = lengths};
  }

 private:
  Tensor dout_, q_, k_, v_, out_, lse_;
  Tensor dlse_;  // null: none was given
  LengthsStack lengths_;
  ScoreStack score_;
  bool deterministic_;
  String backend_;
  std::array<PackedView, 3> views_;
  PackedView dout_view_, out_view_, lse_view_, dlse_view_;
};

void boxed_bwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  VarlenBwdStack owned(reader);
  BwdResult result = varlen_bwd_cuda(owned.args());
  stack[0] = stable::from(result.dq.release());
  stack[1] = stable::from(result.dk.release());
  stack[2] = stable::from(result.dv.release());
  stack[3] = stable::from(result.dsinks.release());
}

void boxed_bwd_plan(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  VarlenFwdStack owned(reader);
  bool const deterministic = reader.value<bool>();
  int64_t const capability = reader.value<int64_t>();
  stack[0] = stable::from(varlen_bwd_plan_json(owned.args(), deterministic, reader.value<bool>(), capability));
}

void boxed_check_bwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  VarlenBwdStack owned(reader);
  String const devices = reader.string();
  VarlenBwdArgs args = owned.args();
  BwdArgs& bwd = args.bwd;
  FwdArgs& call = bwd.call;
  VarlenArgs& lengths = args.lengths;
  set_devices(view(devices),
              {&bwd.dout, &call.q, &call.k, &call.v, &bwd.out, &bwd.lse, if_given(bwd.dlse), &lengths.cu_seqlens_q,
               &lengths.cu_seqlens_k, if_given(lengths.seqused_q), if_given(lengths.seqused_k), if_given(call.sinks),
               if_given(call.alibi_slopes)});
  stack[0] = stable::from(check_varlen_bwd(args, is_cuda(call.q)).scale);
}

}  // namespace
}  // namespace flash_cute

#define FLASH_CUTE_VARLEN_FWD                                                                         \
  "Tensor q, Tensor k, Tensor v, " FLASH_CUTE_LENGTHS ", " FLASH_CUTE_MASK ", " FLASH_CUTE_SCORE ", " \
  "str backend"
#define FLASH_CUTE_VARLEN_BWD                                                                                 \
  "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, " FLASH_CUTE_LENGTHS ", " \
  FLASH_CUTE_MASK ", " FLASH_CUTE_SCORE ", bool deterministic, str backend"

STABLE_TORCH_LIBRARY_FRAGMENT(flash_cute, m) {
  m.def("varlen_fwd(" FLASH_CUTE_VARLEN_FWD ", bool? deterministic=None) -> (Tensor out, Tensor lse)");
  m.def("_varlen_fwd(" FLASH_CUTE_VARLEN_FWD ") -> (Tensor out, Tensor lse)");
  m.def("varlen_fwd_plan(" FLASH_CUTE_VARLEN_FWD ", int capability) -> str");
  m.def("check_varlen_fwd(" FLASH_CUTE_VARLEN_FWD ", str devices=\"\") -> float");
  m.def("varlen_bwd(" FLASH_CUTE_VARLEN_BWD ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
  m.def("_varlen_bwd(" FLASH_CUTE_VARLEN_BWD ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
  m.def("varlen_bwd_plan(" FLASH_CUTE_VARLEN_FWD ", bool deterministic, int capability, bool dlse=False) -> str");
  m.def("check_varlen_bwd(" FLASH_CUTE_VARLEN_BWD ", str devices=\"\") -> float");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, m) {
  m.impl("varlen_fwd", &flash_cute::boxed_forward_with_backward<flash_cute::VarlenFwdStack>);
  m.impl("_varlen_fwd", &flash_cute::boxed_forward<flash_cute::VarlenFwdStack>);
  m.impl("varlen_bwd", &flash_cute::boxed_bwd);
  m.impl("_varlen_bwd", &flash_cute::boxed_bwd);
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, m) {
  m.impl("varlen_fwd_plan", &flash_cute::boxed_forward_plan<flash_cute::VarlenFwdStack>);
  m.impl("check_varlen_fwd", &flash_cute::boxed_check_forward<flash_cute::VarlenFwdStack>);
  m.impl("varlen_bwd_plan", &flash_cute::boxed_bwd_plan);
  m.impl("check_varlen_bwd", &flash_cute::boxed_check_bwd);
}
