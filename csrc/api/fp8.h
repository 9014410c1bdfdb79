// What a call of float8 tensors has besides FwdArgs.
#pragma once

#include <optional>
#include <string_view>

#include "contract/fp8.h"
#include "tensor.h"

namespace flash_cute {

// The factors are float32 on q's device, of any strides. None: 1. `batch` counts the sequences of a packed call; its
// blocks of 128 rows begin at each sequence's own first row.
struct Fp8Args {
  std::optional<TensorInfo> descale_q;    // one number, (batch, heads_kv) or (batch, heads_q, blocks)
  std::optional<TensorInfo> descale_k;    // one number, (batch, heads_kv) or (batch, heads_kv, blocks)
  std::optional<TensorInfo> descale_v;    // one number, (batch, heads_kv) or (batch, heads_kv, head_dim_v)
  std::optional<TensorInfo> descale_out;  // one number or (batch, heads_q); of a float8 out alone
  std::string_view out_dtype;             // as in "bfloat16"
  bool exact_lse;                         // see Fp8Terms
};

}  // namespace flash_cute
