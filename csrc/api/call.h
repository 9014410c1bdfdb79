// A call of the operators, and the words for tensors in messages.
#pragma once

#include <optional>
#include <string>

#include "fp8.h"
#include "mask_args.h"
#include "planning/check.h"
#include "planning/problem.h"
#include "tensor.h"

namespace flash_cute {

struct FwdArgs {
  TensorInfo q;  // (batch, heads_q,  len_q, head_dim)
  TensorInfo k;  // (batch, heads_kv, len_k, head_dim)
  TensorInfo v;  // (batch, heads_kv, len_k, head_dim_v)
  std::string_view causal;
  std::optional<int64_t> window_left;  // none: no limit
  std::optional<int64_t> window_right;
  std::optional<double> softcap;           // none: scores are not capped
  std::optional<TensorInfo> sinks;         // (heads_q,), float32 or q's dtype
  std::optional<TensorInfo> alibi_slopes;  // (heads_q,) or (batch, heads_q), float32
  std::optional<double> scale;
  std::string_view backend;
  // The sequences whose lengths the device alone knows: packed ones, see varlen.h, or those of a cache, see kvcache.h.
  // None: q, k and v are dense.
  std::optional<int64_t> sequences;
  std::optional<Fp8Args> fp8 = std::nullopt;  // given: q, k and v are float8
  std::optional<MaskArgs> mask = std::nullopt;
};

struct BwdArgs {
  FwdArgs call;     // the forward's
  TensorInfo dout;  // (batch, heads_q, len_q, head_dim_v)
  TensorInfo out;   // (batch, heads_q, len_q, head_dim_v), the forward's
  TensorInfo lse;   // (batch, heads_q, len_q), the forward's
  std::optional<TensorInfo> dlse;  // (batch, heads_q, len_q); none: no gradient reaches the LSE
  bool deterministic;
};

inline std::string dtype_name(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float16()) return "float16";
  if (dtype == aoti_torch_dtype_bfloat16()) return "bfloat16";
  if (dtype == aoti_torch_dtype_float32()) return "float32";
  if (dtype == aoti_torch_dtype_float64()) return "float64";
  if (dtype == aoti_torch_dtype_float8_e4m3fn()) return "float8_e4m3fn";
  if (dtype == aoti_torch_dtype_float8_e5m2()) return "float8_e5m2";
  if (dtype == aoti_torch_dtype_uint8()) return "uint8";
  if (dtype == aoti_torch_dtype_int32()) return "int32";
  if (dtype == aoti_torch_dtype_int64()) return "int64";
  if (dtype == aoti_torch_dtype_bool()) return "bool";
  if (dtype == aoti_torch_dtype_complex64()) return "complex64";
  return "another dtype";
}

inline std::string device_name(TensorInfo const& tensor) {
  if (is_cuda(tensor)) return "cuda:" + std::to_string(tensor.device_index);
  if (is_cpu(tensor)) return "cpu";
  return tensor.device_type == aoti_torch_device_type_meta() ? "meta" : "another device";
}

inline std::string shape_text(int64_t const* sizes, int64_t rank) {
  std::string text = "(";
  for (int64_t dim = 0; dim < rank; ++dim) text += (dim ? ", " : "") + std::to_string(sizes[dim]);
  return text + (rank == 1 ? ",)" : ")");
}

inline std::string shape_text(TensorInfo const& tensor) {
  if (tensor.rows_first) {
    int64_t const sizes[] = {tensor.sizes[0], tensor.sizes[2], tensor.sizes[1], tensor.sizes[3]};
    return shape_text(sizes, 4);
  }
  if (!tensor.packed) return shape_text(tensor.sizes, tensor.rank);
  if (tensor.rank == 3) return shape_text(tensor.sizes + 1, 2);
  int64_t const sizes[] = {tensor.sizes[2], tensor.sizes[1], tensor.sizes[3]};
  return shape_text(sizes, 3);
}

}  // namespace flash_cute
