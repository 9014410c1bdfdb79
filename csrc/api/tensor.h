// Tensors and strings of PyTorch's C shim: owning handles, and the metadata that the checks read.
//
// Thinner than torch::stable::Tensor, to keep the host time of a call low: no shared_ptr, and metadata is read once per
// call.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "allocate.h"

namespace flash_cute {

struct DeleteTensor {
  void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};
struct DeleteString {
  void operator()(StringHandle handle) const { torch_delete_string(handle); }
};
using Tensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;
using String = std::unique_ptr<StringOpaque, DeleteString>;

inline std::string_view view(String const& string) {
  size_t length = 0;
  char const* data = nullptr;
  check_shim(torch_string_length(string.get(), &length), "read a string");
  check_shim(torch_string_c_str(string.get(), &data), "read a string");
  return {data, length};
}

// The metadata of one argument; borrowed from a Tensor that outlives it.
struct TensorInfo {
  char const* name;  // as the user calls it, for messages
  AtenTensorHandle handle;
  int64_t const* sizes = nullptr;    // [rank]
  int64_t const* strides = nullptr;  // [rank], in elements
  int64_t rank = 0;
  int32_t dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;
  // Whether sizes and strides are those of a packed tensor seen as a batch of one: (rows, heads, head_dim) as (1,
  // heads, rows, head_dim), and (heads, rows) as (1, heads, rows). Messages show the former.
  bool packed = false;
  // The same of (batch, rows, heads, head_dim) seen as (batch, heads, rows, head_dim).
  bool rows_first = false;
};

inline TensorInfo tensor_info(char const* name, AtenTensorHandle handle) {
  bool is_defined = false;
  check_shim(aoti_torch_is_defined(handle, &is_defined), "read a tensor");
  // None arrives as an undefined tensor, of whose strides the shim writes a stack trace to stderr.
  if (!is_defined) {
    throw std::invalid_argument(std::string("flash_cute: ") + name + ": expected a torch.Tensor, got None");
  }
  int32_t layout = 0;
  check_shim(aoti_torch_get_layout(handle, &layout), "read a tensor's layout");
  if (layout != aoti_torch_layout_strided()) {
    throw std::invalid_argument(std::string("flash_cute: ") + name +
                                ": expected a strided tensor, got a sparse or nested one");
  }
  TensorInfo info{.name = name, .handle = handle};
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  check_shim(aoti_torch_get_sizes(handle, &sizes), "read a tensor's sizes");
  check_shim(aoti_torch_get_strides(handle, &strides), "read a tensor's strides");
  check_shim(aoti_torch_get_dim(handle, &info.rank), "read a tensor's rank");
  check_shim(aoti_torch_get_dtype(handle, &info.dtype), "read a tensor's dtype");
  check_shim(aoti_torch_get_device_type(handle, &info.device_type), "read a tensor's device");
  check_shim(aoti_torch_get_device_index(handle, &info.device_index), "read a tensor's device");
  info.sizes = sizes;
  info.strides = strides;
  return info;
}

inline bool is_cuda(TensorInfo const& tensor) {
  return tensor.device_type == aoti_torch_device_type_cuda();
}
inline bool is_cpu(TensorInfo const& tensor) {
  return tensor.device_type == aoti_torch_device_type_cpu();
}

inline void const* data_pointer(AtenTensorHandle tensor) {
  void const* data = nullptr;
  check_shim(torch_get_const_data_ptr(tensor, &data), "read a tensor's data pointer");
  return data;
}

inline void* mutable_data_pointer(AtenTensorHandle tensor) {
  void* data = nullptr;
  check_shim(torch_get_mutable_data_ptr(tensor, &data), "read a tensor's data pointer");
  return data;
}

template <size_t kRank>
Tensor empty_strided(std::array<int64_t, kRank> const& sizes, std::array<int64_t, kRank> const& strides,
                     int32_t dtype, TensorInfo const& like) {
  return Tensor(allocate(kRank, sizes.data(), strides.data(), dtype, like.device_type, like.device_index));
}

template <size_t kRank>
std::array<int64_t, kRank> contiguous_strides(std::array<int64_t, kRank> const& sizes) {
  std::array<int64_t, kRank> strides{};
  int64_t stride = 1;
  for (size_t dim = kRank; dim-- > 0;) {
    strides[dim] = stride;
    stride *= sizes[dim] > 1 ? sizes[dim] : 1;
  }
  return strides;
}

// Whether the elements, if any, fill one block of memory without gaps or overlaps, in some order of the dims.
inline bool is_dense(TensorInfo const& tensor) {
  int64_t stride = 1;
  unsigned left = 0;  // one bit per dim that is not yet found in the order of strides; dims of size 1 do not matter
  for (int dim = 0; dim < 4; ++dim) {
    if (tensor.sizes[dim] == 0) return true;
    if (tensor.sizes[dim] > 1) left |= 1u << dim;
  }
  while (left != 0) {
    int next = 3;
    while (next >= 0 && !((left >> next & 1) && tensor.strides[next] == stride)) --next;
    if (next < 0) return false;
    stride *= tensor.sizes[next];
    left &= ~(1u << next);
  }
  return true;
}

// A tensor's own dims, in its order, as places in its sizes and strides: those of a packed tensor, seen as a batch of
// one, are (rows, heads, head_dim).
struct OwnDims {
  std::array<int, 4> dims;
  int count;
};

inline OwnDims own_dims(TensorInfo const& tensor) {
  return tensor.packed ? OwnDims{{2, 1, 3}, 3} : OwnDims{{0, 1, 2, 3}, 4};
}

// The strides of a tensor with one block of memory. `dims`: from the outermost to the innermost.
inline std::array<int64_t, 4> packed_strides(OwnDims const& dims, std::array<int64_t, 4> const& sizes) {
  std::array<int64_t, 4> packed{};
  int64_t stride = 1;
  for (int i = dims.count - 1; i >= 0; --i) {
    packed[dims.dims[i]] = stride;
    stride *= sizes[dims.dims[i]] > 1 ? sizes[dims.dims[i]] : 1;
  }
  return packed;
}

// The strides that torch.empty_like gives a tensor of 4 dims, or a packed one: its own if it is dense, else packed in
// the order of its strides. The fake in Python calls empty_like, so that the two must agree. Of a packed tensor the
// first stride, that of the batch of one, has no meaning.
inline std::array<int64_t, 4> empty_like_strides(TensorInfo const& tensor) {
  int64_t const* sizes = tensor.sizes;
  int64_t const* strides = tensor.strides;
  if (is_dense(tensor)) return {strides[0], strides[1], strides[2], strides[3]};
  // Insertion sort, innermost dim first, as PyTorch does it: a zero stride compares equal to every other, which is no
  // strict weak ordering, so that the result depends on the order of the comparisons, and so on the tensor's own dims.
  OwnDims sorted = own_dims(tensor);
  std::array<int, 4>& order = sorted.dims;
  std::reverse(order.begin(), order.begin() + sorted.count);
  auto compare = [&](int a, int b) {  // > 0: a belongs outside b; < 0: inside; 0: either
    if (strides[a] == 0 || strides[b] == 0) return 0;
    if (strides[a] != strides[b]) return strides[a] > strides[b] ? 1 : -1;
    return sizes[a] > sizes[b] ? 1 : 0;
  };
  for (int i = 1; i < sorted.count; ++i) {
    int moving = i;
    for (int j = i - 1; j >= 0; --j) {
      int const comparison = compare(order[j], order[moving]);
      if (comparison < 0) break;
      if (comparison > 0) {
        std::swap(order[j], order[moving]);
        moving = j;
      }
    }
  }
  std::reverse(order.begin(), order.begin() + sorted.count);
  return packed_strides(sorted, {sizes[0], sizes[1], sizes[2], sizes[3]});
}

// The strides of a forward's out: those of empty_like(q), or, where v has a head dim of its own, packed with the dims
// in that order in memory (the outer one first; of equal strides the first dim is the outer one). The stride of a dim
// of size 1 has no meaning: such a head dim is the innermost one, any other such dim an outer one. The fake and the CPU
// path have the same rule in Python.
inline std::array<int64_t, 4> out_strides(TensorInfo const& q, int64_t head_dim_v) {
  std::array<int64_t, 4> const like = empty_like_strides(q);
  if (head_dim_v == q.sizes[3]) return like;
  OwnDims sorted = own_dims(q);
  auto const place = [&](int dim) {
    return q.sizes[dim] == 1 ? std::pair(dim != 3, int64_t{0}) : std::pair(false, like[dim]);
  };
  std::stable_sort(sorted.dims.begin(), sorted.dims.begin() + sorted.count,
                   [&](int a, int b) { return place(a) > place(b); });
  return packed_strides(sorted, {q.sizes[0], q.sizes[1], q.sizes[2], head_dim_v});
}

// The same of a packed tensor, of the output's own dims (rows, heads, head_dim).
inline std::array<int64_t, 3> packed_out_strides(TensorInfo const& q, int64_t head_dim_v) {
  std::array<int64_t, 4> const strides = out_strides(q, head_dim_v);
  return {strides[2], strides[1], strides[3]};
}

}  // namespace flash_cute
