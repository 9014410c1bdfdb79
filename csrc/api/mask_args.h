// What a call with a mask has beside the others: contract/tile_mask.h.
#pragma once

#include <optional>

#include "tensor.h"

namespace flash_cute {

// Tensors of any strides; those of packed sequences are of a batch of one, with the rows and keys of all.
struct MaskArgs {
  // int32, (batch | 1, heads_kv | 1, len_k) each.
  TensorInfo first_row;
  TensorInfo row_limit;
  std::optional<TensorInfo> first_row_2;  // both of these or neither
  std::optional<TensorInfo> row_limit_2;
  // bool, (batch | 1, heads_kv | 1, len_q | 1, len_k | 1): a dim of one holds for all.
  std::optional<TensorInfo> matrix;
  // bool, (batch | 1, heads_kv | 1, blocks of kBlockEdge rows, blocks of as many keys).
  std::optional<TensorInfo> blocks;

  bool has_matrix() const { return matrix || blocks; }  // as GivenMask
};

}  // namespace flash_cute
