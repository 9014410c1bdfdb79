// The checks of a mask: its tensors, never what these hold.
#pragma once

#include "checks_lengths.h"
#include "contract/tile_mask.h"

namespace flash_cute {

inline std::string or_one(int64_t size) { return size == 1 ? "1" : std::to_string(size) + " or 1"; }

// Whether a mask's tensor has the call's batch and KV heads, or one for all.
inline bool fits_heads(FwdArgs const& args, TensorInfo const& tensor) {
  int64_t const batch = args.sequences ? 1 : args.q.sizes[0];
  return (tensor.sizes[0] == 1 || tensor.sizes[0] == batch) &&
         (tensor.sizes[1] == 1 || tensor.sizes[1] == args.k.sizes[1]);
}

// The first two dims that fits_heads takes, in words.
inline std::string heads_text(FwdArgs const& args) {
  return or_one(args.sequences ? 1 : args.q.sizes[0]) + ", " + or_one(args.k.sizes[1]);
}

inline void check_mask_interval(FwdArgs const& args, TensorInfo const& tensor) {
  check_lengths_tensor(args.q, tensor);
  int64_t const keys = args.k.sizes[2];
  FLASH_CUTE_CHECK(tensor.rank == 3 && fits_heads(args, tensor) && tensor.sizes[2] == keys, tensor.name,
                   ": expected the shape (", heads_text(args), ", ", keys, "), a number per key of k, got ",
                   shape_text(tensor));
}

inline void check_mask_bools(FwdArgs const& args, TensorInfo const& tensor) {
  check_same_device(args.q, tensor);
  FLASH_CUTE_CHECK(tensor.dtype == aoti_torch_dtype_bool(), tensor.name, ": expected bool, got ",
                   dtype_name(tensor.dtype));
}

inline void check_mask_matrix(FwdArgs const& args, TensorInfo const& matrix) {
  check_mask_bools(args, matrix);
  int64_t const rows = args.q.sizes[2], keys = args.k.sizes[2];
  auto const fits = [&](int dim, int64_t size) { return matrix.sizes[dim] == 1 || matrix.sizes[dim] == size; };
  FLASH_CUTE_CHECK(matrix.rank == 4 && fits_heads(args, matrix) && fits(2, rows) && fits(3, keys), matrix.name,
                   ": expected the shape (", heads_text(args), ", ", or_one(rows), ", ", or_one(keys),
                   "), a boolean per row of q and key of k, got ", shape_text(matrix));
}

inline void check_mask_blocks(FwdArgs const& args, TensorInfo const& blocks) {
  check_mask_bools(args, blocks);
  auto const number = [](int64_t length) { return (length + kBlockEdge - 1) / kBlockEdge; };
  int64_t const rows = number(args.q.sizes[2]), keys = number(args.k.sizes[2]);
  FLASH_CUTE_CHECK(blocks.rank == 4 && fits_heads(args, blocks) && blocks.sizes[2] == rows && blocks.sizes[3] == keys,
                   blocks.name, ": expected the shape (", heads_text(args), ", ", rows, ", ", keys,
                   "), a boolean per block of ", kBlockEdge, " rows and ", kBlockEdge, " keys, got ",
                   shape_text(blocks));
}

// Checks the tensors, and fills in what a plan knows of them.
inline void check_mask(FwdArgs const& args, Problem& problem) {
  MaskArgs const& mask = *args.mask;
  FLASH_CUTE_CHECK(mask.row_limit_2 || !mask.first_row_2,
                   "mask.row_limit_2: expected a tensor beside first_row_2, got None");
  FLASH_CUTE_CHECK(mask.first_row_2 || !mask.row_limit_2,
                   "mask.first_row_2: expected a tensor beside row_limit_2, got None");
  problem.mask_intervals = mask.first_row_2 ? 2 : 1;
  problem.mask_matrix = mask.has_matrix();
  problem.mask_blocks = mask.blocks.has_value();
  problem.mask_batches = problem.mask_heads = 1;
  auto const check = [&](TensorInfo const& tensor, auto const& check_tensor) {
    check_tensor(args, tensor);
    if (tensor.sizes[0] != 1) problem.mask_batches = static_cast<int>(tensor.sizes[0]);
    if (tensor.sizes[1] != 1) problem.mask_heads = static_cast<int>(tensor.sizes[1]);
  };
  check(mask.first_row, check_mask_interval);
  check(mask.row_limit, check_mask_interval);
  if (mask.first_row_2) check(*mask.first_row_2, check_mask_interval);
  if (mask.row_limit_2) check(*mask.row_limit_2, check_mask_interval);
  if (mask.matrix) check(*mask.matrix, check_mask_matrix);
  if (mask.blocks) check(*mask.blocks, check_mask_blocks);
}

}  // namespace flash_cute
