// Memory for a tensor, so that PyTorch's own exception reaches the caller where there is none: torch.OutOfMemoryError.
//
// The shim's aoti_torch_empty_strided makes an error code of every exception, and up to torch 2.11 prints it. Nothing
// in the stable ABI lets one pass. So at::empty_strided, which the shim calls for CUDA, is called by its symbol. That
// is a weak one: under a torch without it the shim allocates, and a lack of memory is a RuntimeError with PyTorch's
// message. The symbol names the types of its arguments, of which the layouts below are assumed; the first call checks
// them.
#pragma once

#include <cstring>
#include <new>
#include <optional>

#include "shim.h"

namespace flash_cute {
namespace at_abi {

struct SymInts {  // c10::ArrayRef<c10::SymInt>: a SymInt that is not symbolic is an int64_t
  int64_t const* data;
  size_t size;
};

struct Device {  // c10::Device
  int8_t type;
  int8_t index;
};

struct TensorValue {  // at::Tensor, a counted reference; a handle of the shim points to one on the heap
  void* impl;
  ~TensorValue() {}  // by which the ABI returns it in memory; what it refers to is the handle's to release
  TensorValue(TensorValue const&) = delete;
};

// ScalarType and Layout are enumerations of one byte.
__attribute__((weak)) TensorValue empty_strided(SymInts sizes, SymInts strides, std::optional<int8_t> dtype,
                                                std::optional<int8_t> layout, std::optional<Device> device,
                                                std::optional<bool> pin_memory)
    __asm__("_ZN2at4_ops13empty_strided4callEN3c108ArrayRefINS2_6SymIntEEES5_St8optionalINS2_10ScalarTypeEES6_INS2_"
            "6LayoutEES6_INS2_6DeviceEES6_IbE");

inline AtenTensorHandle allocate(int64_t rank, int64_t const* sizes, int64_t const* strides, int32_t dtype,
                                 int32_t device_type, int32_t device_index) {
  auto const free = [](void* memory) { ::operator delete(memory); };
  std::unique_ptr<void, decltype(free)> memory(::operator new(sizeof(TensorValue)), free);
  new (memory.get()) TensorValue(empty_strided({sizes, static_cast<size_t>(rank)}, {strides, static_cast<size_t>(rank)},
                                               static_cast<int8_t>(dtype), std::nullopt,
                                               Device{static_cast<int8_t>(device_type),
                                                      static_cast<int8_t>(device_index)},
                                               std::nullopt));
  return static_cast<AtenTensorHandle>(memory.release());
}

// Whether a tensor without memory comes out as it was asked for.
inline bool allocates_what_is_asked() {
  if (&empty_strided == nullptr) return false;
  int64_t const sizes[] = {3, 2}, strides[] = {1, 5};
  int32_t const dtype = aoti_torch_dtype_bfloat16(), meta = aoti_torch_device_type_meta();
  AtenTensorHandle const tensor = allocate(2, sizes, strides, dtype, meta, -1);
  int64_t rank = 0;
  int64_t *found_sizes = nullptr, *found_strides = nullptr;
  int32_t found_dtype = -1, found_device = -1;
  bool const read = aoti_torch_get_dim(tensor, &rank) == 0 && aoti_torch_get_sizes(tensor, &found_sizes) == 0 &&
                    aoti_torch_get_strides(tensor, &found_strides) == 0 &&
                    aoti_torch_get_dtype(tensor, &found_dtype) == 0 &&
                    aoti_torch_get_device_type(tensor, &found_device) == 0;
  bool const right = read && rank == 2 && std::memcmp(found_sizes, sizes, sizeof sizes) == 0 &&
                     std::memcmp(found_strides, strides, sizeof strides) == 0 && found_dtype == dtype &&
                     found_device == meta;
  aoti_torch_delete_tensor_object(tensor);
  return right;
}

}  // namespace at_abi

// An uninitialised tensor. The call takes as long as the shim's own, 0.5 us and the allocator's time.
inline AtenTensorHandle allocate(int64_t rank, int64_t const* sizes, int64_t const* strides, int32_t dtype,
                                 int32_t device_type, int32_t device_index) {
  static bool const direct = at_abi::allocates_what_is_asked();
  if (direct) return at_abi::allocate(rank, sizes, strides, dtype, device_type, device_index);
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch_empty_strided(rank, sizes, strides, dtype, device_type, device_index, &handle),
             "allocate a tensor");
  return handle;
}

}  // namespace flash_cute
