// A tensor of another order of dims seen as (batch, heads, rows, head_dim), so that the checks, strides and copies of
// dense calls serve it.
#pragma once

#include "tensor.h"

namespace flash_cute {

// The sizes and strides of a packed tensor as a batch of one; `info` points into it.
class PackedView {
 public:
  // `tensor`: (rows, heads, head_dim), or (heads, rows) if `rank` is 2. One of another rank is left as it is, and not
  // `packed`: no shape of a packed tensor then equals its own.
  TensorInfo info(TensorInfo tensor, int64_t rank) {
    if (tensor.rank != rank) return tensor;
    int64_t const* sizes = tensor.sizes;
    int64_t const* strides = tensor.strides;
    if (rank == 3) {
      sizes_ = {1, sizes[1], sizes[0], sizes[2]};
      strides_ = {sizes[1] * strides[1], strides[1], strides[0], strides[2]};  // as PyTorch's unsqueeze has the first
    } else {
      sizes_ = {1, sizes[0], sizes[1], 0};
      strides_ = {sizes[0] * strides[0], strides[0], strides[1], 0};
    }
    tensor.sizes = sizes_.data();
    tensor.strides = strides_.data();
    tensor.rank = rank + 1;
    tensor.packed = true;
    return tensor;
  }

 private:
  std::array<int64_t, 4> sizes_;
  std::array<int64_t, 4> strides_;
};

// The same of (batch, rows, heads, head_dim).
class RowsFirstView {
 public:
  // A tensor of another rank is left as it is, and not `rows_first`.
  TensorInfo info(TensorInfo tensor) {
    if (tensor.rank != 4) return tensor;
    sizes_ = {tensor.sizes[0], tensor.sizes[2], tensor.sizes[1], tensor.sizes[3]};
    strides_ = {tensor.strides[0], tensor.strides[2], tensor.strides[1], tensor.strides[3]};
    tensor.sizes = sizes_.data();
    tensor.strides = strides_.data();
    tensor.rows_first = true;
    return tensor;
  }

 private:
  std::array<int64_t, 4> sizes_;
  std::array<int64_t, 4> strides_;
};

}  // namespace flash_cute
