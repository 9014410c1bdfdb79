// Quantisation to float8 as the operator calls it.
#pragma once

#include <optional>
#include <string_view>

#include "packed_view.h"

namespace flash_cute {

struct QuantizeArgs {
  TensorInfo x;              // (batch, heads, rows, head_dim), or packed, as a batch of one
  std::string_view dtype;    // "float8_e4m3fn" or "float8_e5m2"
  std::string_view per;      // "head", "block" or "channel"
  int64_t heads_kv;          // q's heads in so many groups
  bool center;               // subtract the mean of the rows
  std::optional<int64_t> seed;        // of the rotation's signs; none: no rotation
  std::optional<TensorInfo> key_mean;    // (batch, heads_kv, head_dim) float32: what k's quantisation returned, for q
  std::optional<TensorInfo> cu_seqlens;  // (sequences + 1,) int32: packed
  std::optional<int64_t> max_seqlen;     // the longest sequence, which the number of blocks follows; none: all rows
};

struct QuantizeResult {
  Tensor out;      // float8, like x, rows contiguous
  Tensor descale;  // float32
  Tensor mean;     // (batch, heads_kv, head_dim) float32, or (0,)
  Tensor shift;    // (batch, heads, rows), packed (heads, rows), float32, or (0,)
};

void check_quantize(QuantizeArgs const& args);

// CUDA tensors, on the current stream of their device.
QuantizeResult quantize_cuda(QuantizeArgs const& args);

}  // namespace flash_cute
