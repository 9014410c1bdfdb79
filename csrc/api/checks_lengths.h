// The checks of the tensors that hold lengths: offsets, and numbers of rows or keys in use. What they hold is the
// device's alone.
#pragma once

#include "same.h"

namespace flash_cute {

inline void check_lengths_tensor(TensorInfo const& q, TensorInfo const& tensor) {
  check_same_device(q, tensor);
  FLASH_CUTE_CHECK(tensor.dtype == aoti_torch_dtype_int32(), tensor.name, ": expected int32, got ",
                   dtype_name(tensor.dtype));
}

inline void check_contiguous(TensorInfo const& tensor) {
  FLASH_CUTE_CHECK(tensor.sizes[0] <= 1 || tensor.strides[0] == 1, tensor.name,
                   ": expected a contiguous tensor, got a stride of ", tensor.strides[0]);
}

inline void check_offsets(TensorInfo const& q, TensorInfo const& offsets) {
  check_lengths_tensor(q, offsets);
  FLASH_CUTE_CHECK(offsets.rank == 1 && offsets.sizes[0] >= 1, offsets.name,
                   ": expected the shape (sequences + 1,), got ", shape_text(offsets));
  FLASH_CUTE_CHECK(offsets.sizes[0] - 1 <= kMaxLength, offsets.name, ": expected at most 10^9 sequences, got ",
                   offsets.sizes[0] - 1);
  check_contiguous(offsets);
}

inline void check_used(TensorInfo const& q, TensorInfo const& used, int64_t sequences) {
  check_lengths_tensor(q, used);
  FLASH_CUTE_CHECK(used.rank == 1 && used.sizes[0] == sequences, used.name, ": expected the shape (", sequences,
                   ",), a number per sequence, got ", shape_text(used));
  check_contiguous(used);
}

}  // namespace flash_cute
