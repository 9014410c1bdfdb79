// Checks of a tensor against another, which is q in most calls.
#pragma once

#include "call.h"

namespace flash_cute {

inline void check_same_dtype(TensorInfo const& q, TensorInfo const& other) {
  FLASH_CUTE_CHECK(other.dtype == q.dtype, other.name, ": expected ", q.name, "'s dtype ", dtype_name(q.dtype),
                   ", got ", dtype_name(other.dtype));
}

inline void check_same_device(TensorInfo const& q, TensorInfo const& other) {
  FLASH_CUTE_CHECK(other.device_type == q.device_type && other.device_index == q.device_index, other.name,
                   ": expected ", q.name, "'s device ", device_name(q), ", got ", device_name(other));
}

}  // namespace flash_cute
