// The checks of what a call of float8 tensors has besides the others.
#pragma once

#include <iterator>

#include "same.h"

namespace flash_cute {

// The names of OutType's values.
constexpr std::string_view kOutTypeNames[] = {"float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"};

inline OutType parse_out_type(std::string_view name) {
  auto const found = std::find(std::begin(kOutTypeNames), std::end(kOutTypeNames), name);
  FLASH_CUTE_CHECK(found != std::end(kOutTypeNames),
                   "out_dtype: expected float16, bfloat16, float32, float8_e4m3fn or float8_e5m2, got ", name);
  return static_cast<OutType>(found - std::begin(kOutTypeNames));
}

inline int32_t torch_dtype(OutType type) {
  switch (type) {
    case OutType::kFloat16: return aoti_torch_dtype_float16();
    case OutType::kBFloat16: return aoti_torch_dtype_bfloat16();
    case OutType::kFloat32: return aoti_torch_dtype_float32();
    case OutType::kE4M3: return aoti_torch_dtype_float8_e4m3fn();
    case OutType::kE5M2: return aoti_torch_dtype_float8_e5m2();
  }
  return -1;
}

inline bool is_float8(OutType type) { return type == OutType::kE4M3 || type == OutType::kE5M2; }

inline bool is_e5m2(TensorInfo const& tensor) { return tensor.dtype == aoti_torch_dtype_float8_e5m2(); }

inline void check_float8(TensorInfo const& tensor) {
  FLASH_CUTE_CHECK(tensor.dtype == aoti_torch_dtype_float8_e4m3fn() || is_e5m2(tensor), tensor.name,
                   ": expected float8_e4m3fn or float8_e5m2, got ", dtype_name(tensor.dtype));
}

inline bool is_one_number(TensorInfo const& tensor) {
  return std::all_of(tensor.sizes, tensor.sizes + tensor.rank, [](int64_t size) { return size == 1; });
}

// The shapes that a descale may have besides that of one number.
struct DescaleShapes {
  int64_t batch;
  int64_t heads;           // (batch, heads)
  int64_t heads_of_three;  // (batch, heads_of_three, third)
  int64_t third;           // kNone: there is no such shape; kSome: the device alone knows how long it must be

  static constexpr int64_t kNone = -1, kSome = -2;

  bool allow(TensorInfo const& tensor) const {
    if (is_one_number(tensor)) return true;
    int64_t const* sizes = tensor.sizes;
    if (tensor.rank == 2) return sizes[0] == batch && sizes[1] == heads;
    return tensor.rank == 3 && third != kNone && sizes[0] == batch && sizes[1] == heads_of_three &&
           (third == kSome ? sizes[2] >= 1 : sizes[2] == third);
  }

  std::string text() const {
    int64_t const two[] = {batch, heads}, three[] = {batch, heads_of_three, third};
    std::string const shapes = "one number or the shape " + shape_text(two, 2);
    if (third == kNone) return shapes;
    if (third != kSome) return shapes + " or " + shape_text(three, 3);
    return shapes + " or (" + std::to_string(batch) + ", " + std::to_string(heads_of_three) + ", blocks of 128 rows)";
  }
};

inline void check_descale(TensorInfo const& q, std::optional<TensorInfo> const& descale, DescaleShapes const& shapes) {
  if (!descale) return;
  check_same_device(q, *descale);
  FLASH_CUTE_CHECK(descale->dtype == aoti_torch_dtype_float32(), descale->name, ": expected float32, got ",
                   dtype_name(descale->dtype));
  FLASH_CUTE_CHECK(shapes.allow(*descale), descale->name, ": expected ", shapes.text(), ", got ",
                   shape_text(*descale));
}

inline int64_t blocks_of(int64_t length) { return (length + Fp8Terms::kBlock - 1) / Fp8Terms::kBlock; }

// After the checks of the tensors' shapes.
inline void check_fp8(FwdArgs const& args) {
  Fp8Args const& fp8 = *args.fp8;
  int64_t const batch = args.sequences.value_or(args.q.sizes[0]);
  int64_t const heads_q = args.q.sizes[1], heads_kv = args.k.sizes[1];
  auto const blocks = [&](TensorInfo const& tensor) {
    return args.sequences ? DescaleShapes::kSome : blocks_of(tensor.sizes[2]);
  };
  check_descale(args.q, fp8.descale_q, {batch, heads_kv, heads_q, blocks(args.q)});
  check_descale(args.q, fp8.descale_k, {batch, heads_kv, heads_kv, blocks(args.k)});
  check_descale(args.q, fp8.descale_v, {batch, heads_kv, heads_kv, args.v.sizes[3]});
  check_descale(args.q, fp8.descale_out, {batch, heads_q, 0, DescaleShapes::kNone});
  FLASH_CUTE_CHECK(is_float8(parse_out_type(fp8.out_dtype)) || !fp8.descale_out,
                   "descale_out: expected None for an out of ", fp8.out_dtype, ", which is not float8, got a tensor");
}

// The blocks of a packed tensor's descales must reach the end of the longest sequence. The host knows no more of its
// length than a hint.
inline void check_blocks_by_hint(std::optional<TensorInfo> const& descale, std::optional<int64_t> hint, int64_t rows) {
  if (!descale || !hint || descale->rank != 3 || is_one_number(*descale)) return;
  int64_t const longest = std::min(*hint, rows);
  FLASH_CUTE_CHECK(descale->sizes[2] >= blocks_of(longest), descale->name, ": expected at least ", blocks_of(longest),
                   " blocks of 128 rows for sequences of up to ", longest, ", got ", shape_text(*descale));
}

// The rules of the CUDA kernels.
inline void check_fp8_cuda_rules(Problem const& problem) {
  constexpr int kLargest = 256;
  FLASH_CUTE_CHECK(problem.head_dim <= kLargest, "q: expected a head dim of at most ", kLargest,
                   " for float8 tensors on CUDA, got ", problem.head_dim);
  FLASH_CUTE_CHECK(problem.head_dim_v <= kLargest, "v: expected a head dim of at most ", kLargest,
                   " for float8 tensors on CUDA, got ", problem.head_dim_v);
  FLASH_CUTE_CHECK(problem.asked.backend != Backend::kSm80,
                   "backend: expected 'auto' or 'sm90' for float8 tensors, got 'sm80'");
}

}  // namespace flash_cute
