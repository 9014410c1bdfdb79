// The memory that a kernel reads or writes for a tensor: the tensor's own if 16-byte vectors can access it, else a
// padded copy.
#pragma once

#include "device.h"

namespace flash_cute {

// Disables the recording of gradients inside an operator, which PyTorch does not do for operators without autograd.
class NoGrad {
 public:
  NoGrad() : was_enabled_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(was_enabled_); }
  NoGrad(NoGrad const&) = delete;

 private:
  bool was_enabled_;
};

inline void copy_into(AtenTensorHandle destination, AtenTensorHandle source) {
  NoGrad no_grad;
  check_shim(aoti_torch_copy_(destination, source, /*non_blocking=*/1), "copy a tensor");
}

// The tensor with the dims that its sizes and strides say: a packed one as a batch of one.
inline Tensor as_batch(TensorInfo const& tensor) {
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch__reinterpret_tensor(tensor.handle, tensor.rank, tensor.sizes, tensor.strides, 0, &handle),
             "take a view of a tensor");
  return Tensor(handle);
}

inline void zero(AtenTensorHandle tensor) { check_shim(aoti_torch_zero_(tensor), "zero a tensor"); }

using Sizes = std::array<int64_t, 4>;

inline Tensor empty_like(TensorInfo const& like) {
  Sizes const sizes{like.sizes[0], like.sizes[1], like.sizes[2], like.sizes[3]};
  return empty_strided(sizes, empty_like_strides(like), like.dtype, like);
}

// A contiguous tensor whose rows are whole 16-byte vectors.
struct Padded {
  Tensor tensor;
  Sizes sizes = {};

  static Padded empty(TensorInfo const& like, int padded_head_dim) {
    Sizes const sizes{like.sizes[0], like.sizes[1], like.sizes[2], padded_head_dim};
    return {.tensor = empty_strided(sizes, contiguous_strides(sizes), like.dtype, like), .sizes = sizes};
  }

  // Columns [first, first + width), as a view.
  Tensor columns(int64_t first, int64_t width) const {
    Sizes const strides = contiguous_strides(sizes);
    Sizes view_sizes = sizes;
    view_sizes[3] = width;
    AtenTensorHandle handle = nullptr;
    check_shim(
        aoti_torch__reinterpret_tensor(tensor.get(), 4, view_sizes.data(), strides.data(), first, &handle),
        "take a view of a tensor");
    return Tensor(handle);
  }
};

// A copy whose padding columns are zero, so that they add nothing to a score.
inline Padded padded_copy(TensorInfo const& tensor, int padded_head_dim) {
  Padded copy = Padded::empty(tensor, padded_head_dim);
  int64_t const head_dim = tensor.sizes[3];
  copy_into(copy.columns(0, head_dim).get(), tensor.packed ? as_batch(tensor).get() : tensor.handle);
  if (head_dim < padded_head_dim) zero(copy.columns(head_dim, padded_head_dim - head_dim).get());
  return copy;
}

// The stride of a dim of size 1 has no meaning and may be anything; 0 is safe in a kernel's arithmetic.
inline Strides kernel_strides(int64_t const* sizes, int64_t const* strides) {
  auto stride = [&](int dim) { return sizes[dim] > 1 ? strides[dim] : 0; };
  return {.batch = stride(0), .head = stride(1), .row = stride(2)};
}

// A tensor that a kernel reads.
class Operand {
 public:
  Operand(TensorInfo const& tensor, Copy reason, int padded_head_dim) {
    TensorInfo source = tensor;
    if (reason != Copy::kNone) {
      copy_ = padded_copy(tensor, padded_head_dim);
      source = tensor_info(tensor.name, copy_.tensor.get());
    }
    data = data_pointer(source.handle);
    strides = kernel_strides(source.sizes, source.strides);
  }

  void const* data;
  Strides strides;

 private:
  Padded copy_;  // null when the tensor itself is read
};

// A tensor that a kernel writes; call `finish` after the launch, which copies a padded buffer to the tensor.
class Result {
 public:
  Result(TensorInfo const& tensor, Copy reason, int padded_head_dim) : tensor_(tensor) {
    TensorInfo target = tensor;
    if (reason != Copy::kNone) {
      buffer_ = Padded::empty(tensor, padded_head_dim);
      target = tensor_info(tensor.name, buffer_.tensor.get());
    }
    data = mutable_data_pointer(target.handle);
    strides = kernel_strides(target.sizes, target.strides);
  }

  void finish() const {
    if (!buffer_.tensor) return;
    copy_into(tensor_.packed ? as_batch(tensor_).get() : tensor_.handle, buffer_.columns(0, tensor_.sizes[3]).get());
  }

  void* data;
  Strides strides;

 private:
  TensorInfo tensor_;
  Padded buffer_;  // null when the tensor itself is written
};

// The LSE or its gradient, which kernels read as contiguous: copied if it is not.
class RowOperand {
 public:
  explicit RowOperand(TensorInfo const& tensor) {
    bool contiguous = false;
    check_shim(aoti_torch_is_contiguous(tensor.handle, &contiguous), "read a tensor's strides");
    if (!contiguous) {
      std::array<int64_t, 3> const sizes{tensor.sizes[0], tensor.sizes[1], tensor.sizes[2]};
      copy_ = empty_strided(sizes, contiguous_strides(sizes), tensor.dtype, tensor);
      copy_into(copy_.get(), tensor.handle);
    }
    data = static_cast<float const*>(data_pointer(contiguous ? tensor.handle : copy_.get()));
  }

  float const* data;

 private:
  Tensor copy_;  // null when the tensor itself is read
};

constexpr double kLog2E = 1.4426950408889634;

}  // namespace flash_cute
