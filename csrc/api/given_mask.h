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
  auto const matrix_tensor = [](TensorInfo const& tensor) -> MatrixTensor {
    auto const stride = [&](int dim) { return tensor.sizes[dim] == 1 ? 0 : tensor.strides[dim]; };
    return {.data = static_cast<bool const*>(data_pointer(tensor.handle)),
            .batch_stride = stride(0),
            .head_stride = stride(1),
            .row_stride = stride(2),
            .column_stride = stride(3)};
  };
  MaskArgs const& mask = *args.mask;
  GivenMask given{};
  given.first_row[0] = column_tensor(mask.first_row);
  given.row_limit[0] = column_tensor(mask.row_limit);
  if (mask.first_row_2) {
    given.first_row[1] = column_tensor(*mask.first_row_2);
    given.row_limit[1] = column_tensor(*mask.row_limit_2);
  }
  if (mask.matrix) given.matrix = matrix_tensor(*mask.matrix);
  if (mask.blocks) given.blocks = matrix_tensor(*mask.blocks);
  return given;
}

}  // namespace flash_cute
