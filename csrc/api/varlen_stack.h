// The arguments of packed sequences on PyTorch's stack, beside those of stack.h.
#pragma once

#include "stack.h"
#include "varlen.h"

namespace flash_cute {

// SymInt for the hints, so that torch.compile makes no graph per value.
#define FLASH_CUTE_LENGTHS                                                                   \
  "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, SymInt? " \
  "max_seqlen_q, SymInt? max_seqlen_k"

// FLASH_CUTE_LENGTHS on the stack.
class LengthsStack {
 public:
  explicit LengthsStack(StackReader& stack)
      : cu_seqlens_q_(stack.tensor()),
        cu_seqlens_k_(stack.tensor()),
        seqused_q_(stack.optional_tensor()),
        seqused_k_(stack.optional_tensor()),
        max_seqlen_q_(stack.value<std::optional<int64_t>>()),
        max_seqlen_k_(stack.value<std::optional<int64_t>>()) {}

  VarlenArgs args() const {
    return {.cu_seqlens_q = tensor_info("cu_seqlens_q", cu_seqlens_q_.get()),
            .cu_seqlens_k = tensor_info("cu_seqlens_k", cu_seqlens_k_.get()),
            .seqused_q = optional_info("seqused_q", seqused_q_),
            .seqused_k = optional_info("seqused_k", seqused_k_),
            .max_seqlen_q = max_seqlen_q_,
            .max_seqlen_k = max_seqlen_k_};
  }

 private:
  Tensor cu_seqlens_q_, cu_seqlens_k_;
  Tensor seqused_q_, seqused_k_;  // null: none was given
  std::optional<int64_t> max_seqlen_q_, max_seqlen_k_;
};

// The forward's call with q, k and v packed, as views in `views`.
inline FwdArgs pack(FwdArgs call, VarlenArgs const& lengths, std::array<PackedView, 3>& views) {
  call.q = views[0].info(call.q, 3);
  call.k = views[1].info(call.k, 3);
  call.v = views[2].info(call.v, 3);
  TensorInfo const& offsets = lengths.cu_seqlens_q;
  call.sequences = offsets.rank == 1 && offsets.sizes[0] > 0 ? offsets.sizes[0] - 1 : 0;
  return call;
}

}  // namespace flash_cute
