// A forward's arguments on PyTorch's stack, and its boxed functions: dense and packed, of 16 bits and of float8, with a
// mask and without.
#pragma once

#include <vector>

#include "fwd.h"
#include "varlen_stack.h"

namespace flash_cute {

#define FLASH_CUTE_FP8 \
  "Tensor? descale_q, Tensor? descale_k, Tensor? descale_v, Tensor? descale_out, str out_dtype, bool exact_lse"

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

  void add_to(FwdArgs& call) const {
    call.fp8 = Fp8Args{.descale_q = optional_info("descale_q", descale_q_),
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

// What calls of 16 bits without a mask have there: nothing.
struct NothingOwn {
  explicit NothingOwn(StackReader&) {}
  void add_to(FwdArgs&) const {}
};

// `Own`: what the operator has after q, k and v that others do not.
template <class Own>
class FwdStackOf {
 public:
  explicit FwdStackOf(StackReader& stack)
      : q_(stack.tensor()),
        k_(stack.tensor()),
        v_(stack.tensor()),
        own_(stack),
        score_(stack),
        backend_(stack.string()) {}

  FwdArgs args() const {
    FwdArgs args = score_.args(q_, k_, v_, backend_);
    own_.add_to(args);
    return args;
  }

 private:
  Tensor q_, k_, v_;
  Own own_;
  ScoreStack score_;
  String backend_;
};

template <class Own>
class VarlenFwdStackOf {
 public:
  explicit VarlenFwdStackOf(StackReader& stack)
      : q_(stack.tensor()),
        k_(stack.tensor()),
        v_(stack.tensor()),
        own_(stack),
        lengths_(stack),
        score_(stack),
        backend_(stack.string()) {}

  VarlenFwdArgs args() {
    VarlenArgs const lengths = lengths_.args();
    FwdArgs call = pack(score_.args(q_, k_, v_, backend_), lengths, views_);
    own_.add_to(call);
    return {.call = call, .lengths = lengths};
  }

 private:
  Tensor q_, k_, v_;
  Own own_;
  LengthsStack lengths_;
  ScoreStack score_;
  String backend_;
  std::array<PackedView, 3> views_;
};

using FwdStack = FwdStackOf<NothingOwn>;
using VarlenFwdStack = VarlenFwdStackOf<NothingOwn>;

inline FwdResult forward(FwdArgs const& args) { return fwd_cuda(args); }
inline FwdResult forward(VarlenFwdArgs const& args) { return varlen_fwd_cuda(args); }
inline std::string plan_of(FwdArgs const& args, int64_t capability) { return fwd_plan_json(args, capability); }
inline std::string plan_of(VarlenFwdArgs const& args, int64_t capability) {
  return varlen_fwd_plan_json(args, capability);
}

// Adds the tensors that an operator has of its own.
inline void add_own_tensors(std::vector<TensorInfo*>& tensors, FwdArgs& call) {
  if (call.fp8) {
    Fp8Args& fp8 = *call.fp8;
    for (auto* descale : {&fp8.descale_q, &fp8.descale_k, &fp8.descale_v, &fp8.descale_out}) {
      tensors.push_back(if_given(*descale));
    }
  }
  if (call.mask) {
    MaskArgs& mask = *call.mask;
    tensors.insert(tensors.end(),
                   {&mask.first_row, &mask.row_limit, if_given(mask.first_row_2), if_given(mask.row_limit_2),
                    if_given(mask.matrix), if_given(mask.blocks)});
  }
}

inline void add_lengths(std::vector<TensorInfo*>& tensors, VarlenArgs& lengths) {
  tensors.insert(tensors.end(), {&lengths.cu_seqlens_q, &lengths.cu_seqlens_k, if_given(lengths.seqused_q),
                                 if_given(lengths.seqused_k)});
}

// Sets the devices of a call's tensors, in the schema's order, and checks it.
inline Problem check_on(std::string_view devices, FwdArgs& call, VarlenFwdArgs* packed = nullptr) {
  std::vector<TensorInfo*> tensors{&call.q, &call.k, &call.v};
  add_own_tensors(tensors, call);
  if (packed != nullptr) add_lengths(tensors, packed->lengths);
  tensors.insert(tensors.end(), {if_given(call.sinks), if_given(call.alibi_slopes)});
  set_devices(devices, tensors);
  return packed != nullptr ? check_varlen_fwd(*packed, is_cuda(call.q)) : check_fwd(call, is_cuda(call.q));
}
inline Problem check_on(std::string_view devices, VarlenFwdArgs& args) { return check_on(devices, args.call, &args); }

inline void return_result(StableIValue* stack, FwdResult result) {
  stack[0] = stable::from(result.out.release());
  stack[1] = stable::from(result.lse.release());
}

// Of operators with autograd of 16-bit tensors: they have `deterministic` at the end, which only the backward uses.
template <class Stack>
void boxed_forward_with_backward(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  Stack owned(reader);
  reader.value<std::optional<bool>>();
  return_result(stack, forward(owned.args()));
}

template <class Stack>
void boxed_forward(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  Stack owned(reader);
  return_result(stack, forward(owned.args()));
}

template <class Stack>
void boxed_forward_plan(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  Stack owned(reader);
  stack[0] = stable::from(plan_of(owned.args(), reader.value<int64_t>()));
}

template <class Stack>
void boxed_check_forward(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  Stack owned(reader);
  String const devices = reader.string();
  auto args = owned.args();
  stack[0] = stable::from(check_on(view(devices), args).scale);
}

}  // namespace flash_cute
