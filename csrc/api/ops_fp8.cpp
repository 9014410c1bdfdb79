// The operators of float8 tensors and their schemas, dense and packed.
//
//   fp8_fwd, _fp8_fwd, fp8_fwd_plan, check_fp8_fwd   as fwd, _fwd, fwd_plan and check_fwd
//   fp8_varlen_fwd, _fp8_varlen_fwd, fp8_varlen_fwd_plan, check_fp8_varlen_fwd   the same of packed sequences
//
// They have no derivative: what is attached to fp8_fwd from Python refuses tensors that require grad.
//
// q, k and v are float8_e4m3fn or float8_e5m2, each its own, and stand for their values times their descales, whose
// shapes are in fp8.h. `out_dtype` is a name of kOutTypeNames. A float8 out is what attention gives divided by
// `descale_out`, and saturates. CPU kernels are registered from Python.
#include "fwd.h"
#include "varlen_stack.h"

namespace flash_cute {
namespace {

// FLASH_CUTE_FP8 on the stack.
class Fp8Stack {
 public:
  explicit Fp8Stack(StackReader& stack)
      : descale_q_(stack.optional_tensor()),
        descale_k_(stack.optional_tensor()),
        descale_v_(stack.optional_tensor()),
        descale_out_(stack.optional_tensor()),
        out_dtype_(stack.string()),
        exact_lse_(stack.value<bool>()) {}

  Fp8Args args() const {
    return {.descale_q = optional_info("descale_q", descale_q_),
            .descale_k = optional_info("descale_k", descale_k_),
            .descale_v = optional_info("descale_v", descale_v_),
            .descale_out = optional_info("descale_out", descale_out_),
            .out_dtype = view(out_dtype_),
            .exact_lse = exact_lse_};
  }

 private:
  Tensor descale_q_, descale_k_, descale_v_, descale_out_;  // null: none was given
  String out_dtype_;
  bool exact_lse_;
};

class FwdStack {
 public:
  explicit FwdStack(StackReader& stack)
      : q_(stack.tensor()), k_(stack.tensor()), v_(stack.tensor()), fp8_(stack), score_(stack), backend_(stack.string()) {}

  FwdArgs args() const {
    FwdArgs args = score_.args(q_, k_, v_, backend_);
    args.fp8 = fp8_.args();
    return args;
  }

 private:
  Tensor q_, k_, v_;
  Fp8Stack fp8_;
  ScoreStack score_;
  String backend_;
};

class VarlenFwdStack {
 public:
  explicit VarlenFwdStack(StackReader& stack)
      : q_(stack.tensor()),
        k_(stack.tensor()),
        v_(stack.tensor()),
        fp8_(stack),
        lengths_(stack),
        score_(stack),
        backend_(stack.string()) {}

  VarlenFwdArgs args() {
    VarlenArgs const lengths = lengths_.args();
    FwdArgs call = pack(score_.args(q_, k_, v_, backend_), lengths, views_);
    call.fp8 = fp8_.args();
    return {.call = call, .lengths = lengths};
  }

 private:
  Tensor q_, k_, v_;
  Fp8Stack fp8_;
  LengthsStack lengths_;
  ScoreStack score_;
  String backend_;
  std::array<PackedView, 3> views_;
};

void return_result(StableIValue* stack, FwdResult result) {
  stack[0] = stable::from(result.out.release());
  stack[1] = stable::from(result.lse.release());
}

void boxed_fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  FwdStack const owned(reader);
  return_result(stack, fwd_cuda(owned.args()));
}

void boxed_fwd_plan(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  FwdStack const owned(reader);
  stack[0] = stable::from(fwd_plan_json(owned.args(), reader.value<int64_t>()));
}

void boxed_check_fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  FwdStack const owned(reader);
  String const devices = reader.string();
  FwdArgs args = owned.args();
  Fp8Args& fp8 = *args.fp8;
  set_devices(view(devices),
              {&args.q, &args.k, &args.v, if_given(fp8.descale_q), if_given(fp8.descale_k), if_given(fp8.descale_v),
               if_given(fp8.descale_out), if_given(args.sinks), if_given(args.alibi_slopes)});
  stack[0] = stable::from(check_fwd(args, is_cuda(args.q)).scale);
}

void boxed_varlen_fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  VarlenFwdStack owned(reader);
  return_result(stack, varlen_fwd_cuda(owned.args()));
}

void boxed_varlen_fwd_plan(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  VarlenFwdStack owned(reader);
  stack[0] = stable::from(varlen_fwd_plan_json(owned.args(), reader.value<int64_t>()));
}

void boxed_check_varlen_fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  VarlenFwdStack owned(reader);
  String const devices = reader.string();
  VarlenFwdArgs args = owned.args();
  FwdArgs& call = args.call;
  Fp8Args& fp8 = *call.fp8;
  VarlenArgs& lengths = args.lengths;
  set_devices(view(devices),
              {&call.q, &call.k, &call.v, if_given(fp8.descale_q), if_given(fp8.descale_k), if_given(fp8.descale_v),
               if_given(fp8.descale_out), &lengths.cu_seqlens_q, &lengths.cu_seqlens_k, if_given(lengths.seqused_q),
               if_given(lengths.seqused_k), if_given(call.sinks), if_given(call.alibi_slopes)});
  stack[0] = stable::from(check_varlen_fwd(args, is_cuda(call.q)).scale);
}

}  // namespace
}  // namespace flash_cute

#define FLASH_CUTE_FP8 \
  "Tensor? descale_q, Tensor? descale_k, Tensor? descale_v, Tensor? descale_out, str out_dtype, bool exact_lse"
#define FLASH_CUTE_FP8_FWD \
  "Tensor q, Tensor k, Tensor v, " FLASH_CUTE_FP8 ", " FLASH_CUTE_MASK ", " FLASH_CUTE_SCORE ", str backend"
#define FLASH_CUTE_FP8_VARLEN_FWD                                                                    \
  "Tensor q, Tensor k, Tensor v, " FLASH_CUTE_FP8 ", " FLASH_CUTE_LENGTHS ", " FLASH_CUTE_MASK ", " \
  FLASH_CUTE_SCORE ", str backend"

STABLE_TORCH_LIBRARY_FRAGMENT(flash_cute, m) {
  m.def("fp8_fwd(" FLASH_CUTE_FP8_FWD ") -> (Tensor out, Tensor lse)");
  m.def("_fp8_fwd(" FLASH_CUTE_FP8_FWD ") -> (Tensor out, Tensor lse)");
  m.def("fp8_fwd_plan(" FLASH_CUTE_FP8_FWD ", int capability) -> str");
  m.def("check_fp8_fwd(" FLASH_CUTE_FP8_FWD ", str devices=\"\") -> float");
  m.def("fp8_varlen_fwd(" FLASH_CUTE_FP8_VARLEN_FWD ") -> (Tensor out, Tensor lse)");
  m.def("_fp8_varlen_fwd(" FLASH_CUTE_FP8_VARLEN_FWD ") -> (Tensor out, Tensor lse)");
  m.def("fp8_varlen_fwd_plan(" FLASH_CUTE_FP8_VARLEN_FWD ", int capability) -> str");
  m.def("check_fp8_varlen_fwd(" FLASH_CUTE_FP8_VARLEN_FWD ", str devices=\"\") -> float");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, m) {
  m.impl("fp8_fwd", &flash_cute::boxed_fwd);
  m.impl("_fp8_fwd", &flash_cute::boxed_fwd);
  m.impl("fp8_varlen_fwd", &flash_cute::boxed_varlen_fwd);
  m.impl("_fp8_varlen_fwd", &flash_cute::boxed_varlen_fwd);
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, m) {
  m.impl("fp8_fwd_plan", &flash_cute::boxed_fwd_plan);
  m.impl("check_fp8_fwd", &flash_cute::boxed_check_fwd);
  m.impl("fp8_varlen_fwd_plan", &flash_cute::boxed_varlen_fwd_plan);
  m.impl("check_fp8_varlen_fwd", &flash_cute::boxed_check_varlen_fwd);
}
