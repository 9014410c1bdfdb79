// The operators of calls with a mask (contract/tile_mask.h), dense and packed, and their schemas. Operators of their
// own, since six more arguments would cost every call without a mask.
//
//   masked_fwd, _masked_fwd, masked_fwd_plan, check_masked_fwd   as fwd, _fwd, fwd_plan and check_fwd, see ops.cpp
//   masked_bwd, _masked_bwd, masked_bwd_plan, check_masked_bwd   as bwd, _bwd, bwd_plan and check_bwd
//   masked_varlen_*, ...                                         the same of packed sequences, see ops_varlen.cpp
//
// Row i sees key j if causal and window let it and mask_first_row[j] <= i < mask_row_limit[j], or the same of the
// second pair, and where they are given mask_matrix[i, j] and mask_blocks[i / 64, j / 64]: mask_args.h has the shapes.
// The row of a packed call is that of the packed tensor, and a row sees no key of another sequence. A mask has no
// derivative. CPU kernels are registered from Python.
#include "bwd_stack.h"

namespace flash_cute {
namespace {

// FLASH_CUTE_GIVEN_MASK on the stack.
class MaskStack {
 public:
  explicit MaskStack(StackReader& stack)
      : first_row_(stack.tensor()),
        row_limit_(stack.tensor()),
        first_row_2_(stack.optional_tensor()),
        row_limit_2_(stack.optional_tensor()),
        matrix_(stack.optional_tensor()),
        blocks_(stack.optional_tensor()) {}

  void add_to(FwdArgs& call) const {
    call.mask = {.first_row = tensor_info("mask.first_row", first_row_.get()),
                 .row_limit = tensor_info("mask.row_limit", row_limit_.get()),
                 .first_row_2 = optional_info("mask.first_row_2", first_row_2_),
                 .row_limit_2 = optional_info("mask.row_limit_2", row_limit_2_),
                 .matrix = optional_info("mask.matrix", matrix_),
                 .blocks = optional_info("mask.blocks", blocks_)};
  }

 private:
  Tensor first_row_, row_limit_;
  Tensor first_row_2_, row_limit_2_, matrix_, blocks_;  // null: none was given
};

using MaskedFwd = FwdStackOf<MaskStack>;
using MaskedBwd = BwdStackOf<MaskStack>;
using MaskedVarlenFwd = VarlenFwdStackOf<MaskStack>;
using MaskedVarlenBwd = VarlenBwdStackOf<MaskStack>;

}  // namespace
}  // namespace flash_cute

#define FLASH_CUTE_GIVEN_MASK                                                                         \
  "Tensor mask_first_row, Tensor mask_row_limit, Tensor? mask_first_row_2, Tensor? mask_row_limit_2, " \
  "Tensor? mask_matrix, Tensor? mask_blocks"
#define FLASH_CUTE_MASKED_FWD \
  "Tensor q, Tensor k, Tensor v, " FLASH_CUTE_GIVEN_MASK ", " FLASH_CUTE_MASK ", " FLASH_CUTE_SCORE ", str backend"
#define FLASH_CUTE_MASKED_VARLEN_FWD                                                                          \
  "Tensor q, Tensor k, Tensor v, " FLASH_CUTE_GIVEN_MASK ", " FLASH_CUTE_LENGTHS ", " FLASH_CUTE_MASK ", " \
  FLASH_CUTE_SCORE ", str backend"
#define FLASH_CUTE_OF_BWD "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
#define FLASH_CUTE_MASKED_BWD                                                                          \
  FLASH_CUTE_OF_BWD FLASH_CUTE_GIVEN_MASK ", " FLASH_CUTE_MASK ", " FLASH_CUTE_SCORE ", bool deterministic, " \
  "str backend"
#define FLASH_CUTE_MASKED_VARLEN_BWD                                                                     \
  FLASH_CUTE_OF_BWD FLASH_CUTE_GIVEN_MASK ", " FLASH_CUTE_LENGTHS ", " FLASH_CUTE_MASK ", " FLASH_CUTE_SCORE \
  ", bool deterministic, str backend"

STABLE_TORCH_LIBRARY_FRAGMENT(flash_cute, m) {
  m.def("masked_fwd(" FLASH_CUTE_MASKED_FWD ", bool? deterministic=None) -> (Tensor out, Tensor lse)");
  m.def("_masked_fwd(" FLASH_CUTE_MASKED_FWD ") -> (Tensor out, Tensor lse)");
  m.def("masked_fwd_plan(" FLASH_CUTE_MASKED_FWD ", int capability) -> str");
  m.def("check_masked_fwd(" FLASH_CUTE_MASKED_FWD ", str devices=\"\") -> float");
  m.def("masked_bwd(" FLASH_CUTE_MASKED_BWD ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
  m.def("_masked_bwd(" FLASH_CUTE_MASKED_BWD ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
  m.def("masked_bwd_plan(" FLASH_CUTE_MASKED_FWD ", bool deterministic, int capability, bool dlse=False) -> str");
  m.def("check_masked_bwd(" FLASH_CUTE_MASKED_BWD ", str devices=\"\") -> float");
  m.def("masked_varlen_fwd(" FLASH_CUTE_MASKED_VARLEN_FWD
        ", bool? deterministic=None) -> (Tensor out, Tensor lse)");
  m.def("_masked_varlen_fwd(" FLASH_CUTE_MASKED_VARLEN_FWD ") -> (Tensor out, Tensor lse)");
  m.def("masked_varlen_fwd_plan(" FLASH_CUTE_MASKED_VARLEN_FWD ", int capability) -> str");
  m.def("check_masked_varlen_fwd(" FLASH_CUTE_MASKED_VARLEN_FWD ", str devices=\"\") -> float");
  m.def("masked_varlen_bwd(" FLASH_CUTE_MASKED_VARLEN_BWD
        ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
  m.def("_masked_varlen_bwd(" FLASH_CUTE_MASKED_VARLEN_BWD
        ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
  m.def("masked_varlen_bwd_plan(" FLASH_CUTE_MASKED_VARLEN_FWD
        ", bool deterministic, int capability, bool dlse=False) -> str");
  m.def("check_masked_varlen_bwd(" FLASH_CUTE_MASKED_VARLEN_BWD ", str devices=\"\") -> float");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, m) {
  m.impl("masked_fwd", &flash_cute::boxed_forward_with_backward<flash_cute::MaskedFwd>);
  m.impl("_masked_fwd", &flash_cute::boxed_forward<flash_cute::MaskedFwd>);
  m.impl("masked_bwd", &flash_cute::boxed_backward<flash_cute::MaskedBwd>);
  m.impl("_masked_bwd", &flash_cute::boxed_backward<flash_cute::MaskedBwd>);
  m.impl("masked_varlen_fwd", &flash_cute::boxed_forward_with_backward<flash_cute::MaskedVarlenFwd>);
  m.impl("_masked_varlen_fwd", &flash_cute::boxed_forward<flash_cute::MaskedVarlenFwd>);
  m.impl("masked_varlen_bwd", &flash_cute::boxed_backward<flash_cute::MaskedVarlenBwd>);
  m.impl("_masked_varlen_bwd", &flash_cute::boxed_backward<flash_cute::MaskedVarlenBwd>);
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, m) {
  m.impl("masked_fwd_plan", &flash_cute::boxed_forward_plan<flash_cute::MaskedFwd>);
  m.impl("check_masked_fwd", &flash_cute::boxed_check_forward<flash_cute::MaskedFwd>);
  m.impl("masked_bwd_plan", &flash_cute::boxed_backward_plan<flash_cute::MaskedFwd>);
  m.impl("check_masked_bwd", &flash_cute::boxed_check_backward<flash_cute::MaskedBwd>);
  m.impl("masked_varlen_fwd_plan", &flash_cute::boxed_forward_plan<flash_cute::MaskedVarlenFwd>);
  m.impl("check_masked_varlen_fwd", &flash_cute::boxed_check_forward<flash_cute::MaskedVarlenFwd>);
  m.impl("masked_varlen_bwd_plan", &flash_cute::boxed_backward_plan<flash_cute::MaskedVarlenFwd>);
  m.impl("check_masked_varlen_bwd", &flash_cute::boxed_check_backward<flash_cute::MaskedVarlenBwd>);
}
