// The factors of float8 values, read on the device.
#pragma once

#include <cute/tensor.hpp>

#include "contract/fp8.h"

namespace flash_cute::sm90::forward::fp8_rows {

using namespace cute;

// The entries of a batch's head: by blocks, or by columns.
CUTE_DEVICE float const* entries_of(Descale const& descale, int batch, int head) {
  return descale.data + batch * descale.batch_stride + head / descale.heads_per_entry * descale.head_stride;
}

// The factor of a head. Rows of no sequence have a batch past the last one, and no factor.
CUTE_DEVICE float head_factor(Descale const& descale, int batch, int head, int batches) {
  return descale.data == nullptr || batch >= batches ? 1.f : __ldg(entries_of(descale, batch, head));
}

// The factor of a row. A block past the last one counts as that one.
CUTE_DEVICE float block_factor(Descale const& descale, int batch, int head, int row) {
  if (descale.data == nullptr) return 1.f;
  int const block = min(row / Fp8Terms::kBlock, descale.blocks - 1);
  return __ldg(entries_of(descale, batch, head) + block * descale.block_stride);
}

}  // namespace flash_cute::sm90::forward::fp8_rows
