// The operators of dense calls and their schemas; those of packed sequences are in ops_varlen.cpp,
// those with a mask in ops_masked.cpp.
//
//   fwd        attention; autograd is attached to it from Python. `deterministic` is its backward's
//   _fwd       the same kernel without autograd, whose bookkeeping costs more than the launch
//   fwd_plan   the plan of fwd as JSON; capability 0 is the tensors' own device, 90 plans as for an H100
//   check_fwd  raises what fwd would raise, and returns the scale that it would use. `devices` names, in the schema's
//              order, the devices that the given tensors stand for, as in "cuda:0 cuda:0 cpu"; empty: their own
//   bwd, _bwd, bwd_plan, check_bwd   the same for the backward, which has no derivative itself; `dlse` of bwd_plan:
//              whether a gradient reaches the LSE
//
// The mask: row i has position p = i + len_k - len_q, or p = i if `causal` is "top_left", and sees the columns
// p - window_left <= j <= p + window_right; None is no limit. A `causal` other than "none" sets window_right to 0.
//
// The score: scale * q.k, then softcap * tanh(score / softcap) if `softcap` is given, then, with `alibi_slopes`,
// - slope * |p - j|. `sinks` add exp(sink) to the denominator of out, and nothing to the LSE. Without sinks, bwd's
// dsinks is an empty float32 tensor of shape (0,).
//
// `backend` may end with what the products are accumulated in: "auto+float16", "sm80+float16_qk", "auto+float16_pv".
// Only a forward takes that; it is float32 else.
//
// CPU kernels of fwd, _fwd, bwd and _bwd are registered from Python.
#include <torch/csrc/stable/library.h>

#include "bwd_stack.h"

// The arguments of a forward and of a backward.
#define FLASH_CUTE_FWD "Tensor q, Tensor k, Tensor v, " FLASH_CUTE_MASK ", " FLASH_CUTE_SCORE ", str backend"
#define FLASH_CUTE_BWD                                                                                      \
  "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, " FLASH_CUTE_MASK ", " \
  FLASH_CUTE_SCORE ", bool deterministic, str backend"

STABLE_TORCH_LIBRARY(flash_cute, m) {
  m.def("fwd(" FLASH_CUTE_FWD ", bool? deterministic=None) -> (Tensor out, Tensor lse)");
  m.def("_fwd(" FLASH_CUTE_FWD ") -> (Tensor out, Tensor lse)");
  m.def("fwd_plan(" FLASH_CUTE_FWD ", int capability) -> str");
  m.def("check_fwd(" FLASH_CUTE_FWD ", str devices=\"\") -> float");
  m.def("bwd(" FLASH_CUTE_BWD ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
  m.def("_bwd(" FLASH_CUTE_BWD ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
  m.def("bwd_plan(" FLASH_CUTE_FWD ", bool deterministic, int capability, bool dlse=False) -> str");
  m.def("check_bwd(" FLASH_CUTE_BWD ", str devices=\"\") -> float");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, m) {
  m.impl("fwd", &flash_cute::boxed_forward_with_backward<flash_cute::FwdStack>);
  m.impl("_fwd", &flash_cute::boxed_forward<flash_cute::FwdStack>);
  m.impl("bwd", &flash_cute::boxed_backward<flash_cute::BwdStack>);
  m.impl("_bwd", &flash_cute::boxed_backward<flash_cute::BwdStack>);
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, m) {
  m.impl("fwd_plan", &flash_cute::boxed_forward_plan<flash_cute::FwdStack>);
  m.impl("check_fwd", &flash_cute::boxed_check_forward<flash_cute::FwdStack>);
  m.impl("bwd_plan", &flash_cute::boxed_backward_plan<flash_cute::FwdStack>);
  m.impl("check_bwd", &flash_cute::boxed_check_backward<flash_cute::BwdStack>);
}
