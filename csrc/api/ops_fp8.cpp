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
#include "fwd_stack.h"

namespace flash_cute {
namespace {

using Dense = FwdStackOf<Fp8Stack>;
using Packed = VarlenFwdStackOf<Fp8Stack>;

}  // namespace
}  // namespace flash_cute

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
  m.impl("fp8_fwd", &flash_cute::boxed_forward<flash_cute::Dense>);
  m.impl("_fp8_fwd", &flash_cute::boxed_forward<flash_cute::Dense>);
  m.impl("fp8_varlen_fwd", &flash_cute::boxed_forward<flash_cute::Packed>);
  m.impl("_fp8_varlen_fwd", &flash_cute::boxed_forward<flash_cute::Packed>);
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, m) {
  m.impl("fp8_fwd_plan", &flash_cute::boxed_forward_plan<flash_cute::Dense>);
  m.impl("check_fp8_fwd", &flash_cute::boxed_check_forward<flash_cute::Dense>);
  m.impl("fp8_varlen_fwd_plan", &flash_cute::boxed_forward_plan<flash_cute::Packed>);
  m.impl("check_fp8_varlen_fwd", &flash_cute::boxed_check_forward<flash_cute::Packed>);
}
