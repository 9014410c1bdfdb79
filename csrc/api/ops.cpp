// The operators: every schema stands here, and here alone.
//
//   fwd       attention; autograd is attached to it from Python
//   _fwd      the same kernel without autograd, whose bookkeeping costs more than the launch
//   fwd_plan  what fwd would do, as JSON; capability 0 is the tensors' own device, 90 plans as on an H100
//   check_fwd raises what fwd would raise, and returns the scale that it would use
//
// CPU kernels of fwd and _fwd are registered from Python.
#include <torch/csrc/stable/library.h>

#include "fwd.h"

namespace flash_cute {
namespace {

namespace stable = torch::stable::detail;

// Owns what PyTorch puts on the stack: q, k, v, causal, scale, backend. Boxed by hand, since in torch
// 2.11 TORCH_BOX leaks every str argument.
class FwdStack {
 public:
  explicit FwdStack(StableIValue const* stack)
      : q_(stable::to<AtenTensorHandle>(stack[0])),
        k_(stable::to<AtenTensorHandle>(stack[1])),
        v_(stable::to<AtenTensorHandle>(stack[2])),
        causal_(stable::to<StringHandle>(stack[3])),
        scale_(stable::to<std::optional<double>>(stack[4])),
        backend_(stable::to<StringHandle>(stack[5])) {}

  FwdArgs args() const {
    return {.q = tensor_info("q", q_.get()),
            .k = tensor_info("k", k_.get()),
            .v = tensor_info("v", v_.get()),
            .causal = view(causal_),
            .scale = scale_,
            .backend = view(backend_)};
  }

 private:
  Tensor q_, k_, v_;
  String causal_;
  std::optional<double> scale_;
  String backend_;
};

void boxed_fwd(StableIValue* stack, uint64_t, uint64_t) {
  FwdStack const owned(stack);
  FwdResult result = fwd_cuda(owned.args());
  stack[0] = stable::from(result.out.release());
  stack[1] = stable::from(result.lse.release());
}

void boxed_fwd_plan(StableIValue* stack, uint64_t, uint64_t) {
  FwdStack const owned(stack);
  stack[0] = stable::from(fwd_plan_json(owned.args(), stable::to<int64_t>(stack[6])));
}

void boxed_check_fwd(StableIValue* stack, uint64_t, uint64_t) {
  FwdStack const owned(stack);
  FwdArgs const args = owned.args();
  stack[0] = stable::from(check_fwd(args, is_cuda(args.q)).scale);
}

}  // namespace
}  // namespace flash_cute

STABLE_TORCH_LIBRARY(flash_cute, m) {
  m.def("fwd(Tensor q, Tensor k, Tensor v, str causal, float? scale, str backend) -> (Tensor out, Tensor lse)");
  m.def("_fwd(Tensor q, Tensor k, Tensor v, str causal, float? scale, str backend) -> (Tensor out, Tensor lse)");
  m.def("fwd_plan(Tensor q, Tensor k, Tensor v, str causal, float? scale, str backend, int capability) -> str");
  m.def("check_fwd(Tensor q, Tensor k, Tensor v, str causal, float? scale, str backend) -> float");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, m) {
  m.impl("fwd", &flash_cute::boxed_fwd);
  m.impl("_fwd", &flash_cute::boxed_fwd);
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, m) {
  m.impl("fwd_plan", &flash_cute::boxed_fwd_plan);
  m.impl("check_fwd", &flash_cute::boxed_check_fwd);
}
