// A backward's arguments on PyTorch's stack, and its boxed functions: dense and packed, with a mask and without.
#pragma once

#include "bwd.h"
#include "fwd_stack.h"

namespace flash_cute {

template <class Own>
class BwdStackOf {
 public:
  explicit BwdStackOf(StackReader& stack)
      : dout_(stack.tensor()),
        q_(stack.tensor()),
        k_(stack.tensor()),
        v_(stack.tensor()),
        out_(stack.tensor()),
        lse_(stack.tensor()),
        dlse_(stack.optional_tensor()),
        own_(stack),
        score_(stack),
        deterministic_(stack.value<bool>()),
        backend_(stack.string()) {}

  BwdArgs args() const {
    FwdArgs call = score_.args(q_, k_, v_, backend_);
    own_.add_to(call);
    return {.call = call,
            .dout = tensor_info("dout", dout_.get()),
            .out = tensor_info("out", out_.get()),
            .lse = tensor_info("lse", lse_.get()),
            .dlse = optional_info("dlse", dlse_),
            .deterministic = deterministic_};
  }

 private:
  Tensor dout_, q_, k_, v_, out_, lse_;
  Tensor dlse_;  // null: none was given
  Own own_;
  ScoreStack score_;
  bool deterministic_;
  String backend_;
};

template <class Own>
class VarlenBwdStackOf {
 public:
  explicit VarlenBwdStackOf(StackReader& stack)
      : dout_(stack.tensor()),
        q_(stack.tensor()),
        k_(stack.tensor()),
        v_(stack.tensor()),
        out_(stack.tensor()),
        lse_(stack.tensor()),
        dlse_(stack.optional_tensor()),
        own_(stack),
        lengths_(stack),
        score_(stack),
        deterministic_(stack.value<bool>()),
        backend_(stack.string()) {}

  VarlenBwdArgs args() {
    VarlenArgs const lengths = lengths_.args();
    FwdArgs call = pack(score_.args(q_, k_, v_, backend_), lengths, views_);
    own_.add_to(call);
    std::optional<TensorInfo> dlse = optional_info("dlse", dlse_);
    if (dlse) dlse = dlse_view_.info(*dlse, 2);
    return {.bwd = {.call = call,
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
  Own own_;
  LengthsStack lengths_;
  ScoreStack score_;
  bool deterministic_;
  String backend_;
  std::array<PackedView, 3> views_;
  PackedView dout_view_, out_view_, lse_view_, dlse_view_;
};

using BwdStack = BwdStackOf<NothingOwn>;
using VarlenBwdStack = VarlenBwdStackOf<NothingOwn>;

inline BwdResult backward(BwdArgs const& args) { return bwd_cuda(args); }
inline BwdResult backward(VarlenBwdArgs const& args) { return varlen_bwd_cuda(args); }
inline std::string bwd_plan_of(FwdArgs const& args, bool deterministic, bool has_dlse, int64_t capability) {
  return bwd_plan_json(args, deterministic, has_dlse, capability);
}
inline std::string bwd_plan_of(VarlenFwdArgs const& args, bool deterministic, bool has_dlse, int64_t capability) {
  return varlen_bwd_plan_json(args, deterministic, has_dlse, capability);
}

// Sets the devices of a call's tensors, in the schema's order, and checks it.
inline Problem check_on(std::string_view devices, BwdArgs& bwd, VarlenBwdArgs* packed = nullptr) {
  FwdArgs& call = bwd.call;
  std::vector<TensorInfo*> tensors{&bwd.dout, &call.q,  &call.k,           &call.v,
                                   &bwd.out,  &bwd.lse, if_given(bwd.dlse)};
  add_own_tensors(tensors, call);
  if (packed != nullptr) add_lengths(tensors, packed->lengths);
  tensors.insert(tensors.end(), {if_given(call.sinks), if_given(call.alibi_slopes)});
  set_devices(devices, tensors);
  return packed != nullptr ? check_varlen_bwd(*packed, is_cuda(call.q)) : check_bwd(bwd, is_cuda(call.q));
}
inline Problem check_on(std::string_view devices, VarlenBwdArgs& args) { return check_on(devices, args.bwd, &args); }

template <class Stack>
void boxed_backward(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  Stack owned(reader);
  BwdResult result = backward(owned.args());
  stack[0] = stable::from(result.dq.release());
  stack[1] = stable::from(result.dk.release());
  stack[2] = stable::from(result.dv.release());
  stack[3] = stable::from(result.dsinks.release());
}

// `ForwardStack`: the plan takes the forward's arguments.
template <class ForwardStack>
void boxed_backward_plan(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  ForwardStack owned(reader);
  bool const deterministic = reader.value<bool>();
  int64_t const capability = reader.value<int64_t>();
  stack[0] = stable::from(bwd_plan_of(owned.args(), deterministic, reader.value<bool>(), capability));
}

template <class Stack>
void boxed_check_backward(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  Stack owned(reader);
  String const devices = reader.string();
  auto args = owned.args();
  stack[0] = stable::from(check_on(view(devices), args).scale);
}

}  // namespace flash_cute
