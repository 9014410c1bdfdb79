// The operators of packed sequences and their schemas; those of dense calls are in ops.cpp.
//
//   varlen_fwd, _varlen_fwd, varlen_fwd_plan, check_varlen_fwd   as fwd, _fwd, fwd_plan and check_fwd
//   varlen_bwd, _varlen_bwd, varlen_bwd_plan, check_varlen_bwd   as bwd, _bwd, bwd_plan and check_bwd
//
// The lengths, of which the host reads only shapes and dtypes: varlen.h. CPU kernels are registered from Python.
#include "bwd_stack.h"

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
  m.impl("varlen_bwd", &flash_cute::boxed_backward<flash_cute::VarlenBwdStack>);
  m.impl("_varlen_bwd", &flash_cute::boxed_backward<flash_cute::VarlenBwdStack>);
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, m) {
  m.impl("varlen_fwd_plan", &flash_cute::boxed_forward_plan<flash_cute::VarlenFwdStack>);
  m.impl("check_varlen_fwd", &flash_cute::boxed_check_forward<flash_cute::VarlenFwdStack>);
  m.impl("varlen_bwd_plan", &flash_cute::boxed_backward_plan<flash_cute::VarlenFwdStack>);
  m.impl("check_varlen_bwd", &flash_cute::boxed_check_backward<flash_cute::VarlenBwdStack>);
}
