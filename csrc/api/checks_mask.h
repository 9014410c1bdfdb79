// The checks of a mask by intervals: its tensors, never what these hold.
#pragma once

#include "checks_lengths.h"

namespace flash_cute {

inline void check_mask_tensor(FwdArgs const& args, TensorInfo const& tensor) {
  check_lengths_tensor(args.q, tensor);
  int64_t const batch = args.sequences ? 1 : args.q.sizes[0];
  int64_t const heads = args.k.sizes[1], keys = args.k.sizes[2];
  bool const fits = tensor.rank == 3 && (tensor.sizes[0] == 1 || tensor.sizes[0] == batch) &&
                    (tensor.sizes[1] == 1 || tensor.sizes[1] == heads) && tensor.sizes[2] == keys;
  auto const or_one = [](int64_t size) { return size == 1 ? std::string("1") : std::to_string(size) + " or 1"; };
  FLASH_CUTE_CHECK(fits, tensor.name, ": expected the shape (", or_one(batch), ", ", or_one(heads), ", ", keys,
                   "), a number per key of k, got ", shape_text(tensor));
}

// Checks the tensors, and fills in what a plan knows of them.
inline void check_mask(FwdArgs const& args, Problem& problem) {
  MaskArgs const& mask = *args.mask;
  FLASH_CUTE_CHECK(mask.row_limit_2 || !mask.first_row_2, "mask.row_limit_2: expected a tensor beside first_row_2, got None");
  FLASH_CUTE_CHECK(mask.first_row_2 || !mask.row_limit_2, "mask.first_row_2: expected a tensor beside row_limit_2, got None");
  problem.mask_intervals = mask.first_row_2 ? 2 : 1;
  problem.mask_batches = problem.mask_heads = 1;
  auto const check = [&](TensorInfo const& tensor) {
    check_mask_tensor(args, tensor);
    if (tensor.sizes[0] != 1) problem.mask_batches = static_cast<int>(tensor.sizes[0]);
    if (tensor.sizes[1] != 1) problem.mask_heads = static_cast<int>(tensor.sizes[1]);
  };
  check(mask.first_row);
  check(mask.row_limit);
  if (mask.first_row_2) check(*mask.first_row_2);
  if (mask.row_limit_2) check(*mask.row_limit_2);
}

}  // namespace flash_cute
