// What a call with a mask by intervals of rows per column has beside the others: contract/tile_mask.h.
#pragma once

#include <optional>

#include "tensor.h"

namespace flash_cute {

// int32, (batch | 1, heads_kv | 1, len_k) each, of any strides; of packed sequences (1, heads_kv | 1, keys of all).
struct MaskArgs {
  TensorInfo first_row;
  TensorInfo row_limit;
  std::optional<TensorInfo> first_row_2;  // both of these or neither
  std::optional<TensorInfo> row_limit_2;
};

}  // namespace flash_cute
