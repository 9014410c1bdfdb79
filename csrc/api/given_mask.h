// A call's mask as the device kernel reads it that makes tile bits of it.
#pragma once

#include "call.h"
#include "contract/tile_mask.h"

namespace flash_cute {

// `args.mask` is given, and has been checked.
inline GivenMask make_given_mask(FwdArgs const& args) {
  auto const column_tensor = [](TensorInfo const& tensor) -> ColumnTensor {
    return {.data = static_cast<int const*>(data_pointer(tensor.handle)),
            .batch_stride = tensor.sizes[0] == 1 ? 0 : tensor.strides[0],
            .head_stride = tensor.sizes[1] == 1 ? 0 : tensor.strides[1],
            .column_stride = tensor.strides[2]};
  };
  MaskArgs const& mask = *args.mask;
  GivenMask given{};
  given.first_row[0] = column_tensor(mask.first_row);
  given.row_limit[0] = column_tensor(mask.row_limit);
  if (mask.first_row_2) {
    given.first_row[1] = column_tensor(*mask.first_row_2);
    given.row_limit[1] = column_tensor(*mask.row_limit_2);
  }
  return given;
}

}  // namespace flash_cute
