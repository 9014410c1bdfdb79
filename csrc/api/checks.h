// The checks of a call's arguments, done once, before anything is allocated or launched.
#pragma once

#include <algorithm>
#include <array>
#include <climits>
#include <cmath>

#include "checks_fp8.h"
#include "checks_mask.h"
#include "parse.h"
#include "sm80/forward/rows/float16_tile.h"

namespace flash_cute {

inline void check_floating(TensorInfo const& tensor, bool on_cuda) {
  int32_t const dtype = tensor.dtype;
  bool const is_16_bit = dtype == aoti_torch_dtype_float16() || dtype == aoti_torch_dtype_bfloat16();
  bool const is_wide = dtype == aoti_torch_dtype_float32() || dtype == aoti_torch_dtype_float64();
  FLASH_CUTE_CHECK(!on_cuda || is_16_bit, tensor.name, ": expected float16 or bfloat16 on CUDA, got ",
                   dtype_name(dtype));
  FLASH_CUTE_CHECK(is_16_bit || is_wide, tensor.name, ": expected float16, bfloat16, float32 or float64, got ",
                   dtype_name(dtype));
}

inline void check_dtype(FwdArgs const& args, bool on_cuda) {
  if (args.fp8) {
    for (TensorInfo const* tensor : {&args.q, &args.k, &args.v}) check_float8(*tensor);
    return;
  }
  check_floating(args.q, on_cuda);
  for (TensorInfo const* other : {&args.k, &args.v}) check_same_dtype(args.q, *other);
}

inline void check_sizes(TensorInfo const& tensor) {
  for (int dim = 0; dim < tensor.rank; ++dim) {
    FLASH_CUTE_CHECK(tensor.sizes[dim] <= INT_MAX, tensor.name, ": expected sizes below 2^31, got ",
                     shape_text(tensor));
  }
}

inline void check_heads(TensorInfo const& q, TensorInfo const& k) {
  FLASH_CUTE_CHECK(k.sizes[1] > 0 ? q.sizes[1] % k.sizes[1] == 0 : q.sizes[1] == 0,
                   "q: expected a number of heads that is a multiple of ", k.name, "'s ", k.sizes[1], ", got ",
                   q.sizes[1]);
}

inline void check_shapes(FwdArgs const& args) {
  TensorInfo const& q = args.q;
  TensorInfo const& k = args.k;
  TensorInfo const& v = args.v;
  for (TensorInfo const* tensor : {&q, &k, &v}) {
    FLASH_CUTE_CHECK(tensor->rank == 4, tensor->name, ": expected 4 dims (batch, heads, length, head_dim), got ",
                     tensor->rank, ": ", shape_text(*tensor));
    check_sizes(*tensor);
  }
  FLASH_CUTE_CHECK(q.sizes[3] > 0, "q: expected a head dim of at least 1, got ", shape_text(q));
  FLASH_CUTE_CHECK(k.sizes[3] == q.sizes[3], "k: expected q's head dim ", q.sizes[3], ", got ", k.sizes[3]);
  FLASH_CUTE_CHECK(v.sizes[3] > 0, "v: expected a head dim of at least 1, got ", shape_text(v));
  FLASH_CUTE_CHECK(k.sizes[0] == q.sizes[0], "k: expected q's batch size ", q.sizes[0], ", got ", k.sizes[0]);
  FLASH_CUTE_CHECK(v.sizes[0] == q.sizes[0], "v: expected q's batch size ", q.sizes[0], ", got ", v.sizes[0]);
  FLASH_CUTE_CHECK(v.sizes[1] == k.sizes[1], "v: expected as many heads as k, ", k.sizes[1], ", got ", v.sizes[1]);
  FLASH_CUTE_CHECK(v.sizes[2] == k.sizes[2], "v: expected k's length ", k.sizes[2], ", got ", v.sizes[2]);
  check_heads(q, k);
}

// Scores are computed in float32, those of float64 tensors apart: a factor must not overflow or underflow there.
inline void check_float32(TensorInfo const& q, char const* name, double factor) {
  FLASH_CUTE_CHECK(q.dtype == aoti_torch_dtype_float64() || std::isnormal(static_cast<float>(factor)), name,
                   ": expected a number that float32 holds, got ", factor);
}

inline double check_scale(TensorInfo const& q, std::optional<double> scale) {
  if (!scale) return 1.0 / std::sqrt(static_cast<double>(q.sizes[3]));
  FLASH_CUTE_CHECK(std::isfinite(*scale) && *scale > 0, "scale: expected a finite number above 0, got ", *scale);
  check_float32(q, "scale", *scale);
  return *scale;
}

inline double check_softcap(TensorInfo const& q, std::optional<double> softcap) {
  if (!softcap) return 0;
  FLASH_CUTE_CHECK(std::isfinite(*softcap) && *softcap > 0, "softcap: expected None or a finite number above 0, got ",
                   *softcap);
  check_float32(q, "softcap", *softcap);
  return *softcap;
}

inline void check_sinks(TensorInfo const& q, TensorInfo const& sinks, bool has_float8) {
  check_same_device(q, sinks);
  bool const is_float32 = sinks.dtype == aoti_torch_dtype_float32();
  FLASH_CUTE_CHECK(is_float32 || !has_float8, "sinks: expected float32 for float8 tensors, got ",
                   dtype_name(sinks.dtype));
  FLASH_CUTE_CHECK(is_float32 || sinks.dtype == q.dtype, "sinks: expected float32 or q's dtype ", dtype_name(q.dtype),
                   ", got ", dtype_name(sinks.dtype));
  FLASH_CUTE_CHECK(sinks.rank == 1 && sinks.sizes[0] == q.sizes[1], "sinks: expected the shape (", q.sizes[1],
                   ",), a number per query head, got ", shape_text(sinks));
}

inline void check_alibi_slopes(TensorInfo const& q, TensorInfo const& slopes, int64_t batch) {
  check_same_device(q, slopes);
  FLASH_CUTE_CHECK(slopes.dtype == aoti_torch_dtype_float32(), "alibi_slopes: expected float32, got ",
                   dtype_name(slopes.dtype));
  bool const per_head = slopes.rank == 1 && slopes.sizes[0] == q.sizes[1];
  bool const per_batch = slopes.rank == 2 && slopes.sizes[0] == batch && slopes.sizes[1] == q.sizes[1];
  FLASH_CUTE_CHECK(per_head || per_batch, "alibi_slopes: expected the shape (", q.sizes[1], ",) or (", batch, ", ",
                   q.sizes[1], "), a slope per query head, got ", shape_text(slopes));
}

inline void check_window(char const* name, std::optional<int64_t> limit) {
  FLASH_CUTE_CHECK(!limit || *limit >= 0, name, ": expected None (no limit) or a number of at least 0, got ", *limit);
}

// The mask as a band: row i has position i + offset, and sees the columns from position - left to position + right. The
// offset of a packed sequence depends on its lengths, which only the device knows: there the band is relative to the
// position.
inline Band make_band(FwdArgs const& args, Causal causal, int64_t len_k) {
  check_window("window_left", args.window_left);
  check_window("window_right", args.window_right);
  int64_t const len_q = args.q.sizes[2];
  int64_t const offset = args.sequences || causal == Causal::kTopLeft ? 0 : len_k - len_q;
  // Clamped so that nothing overflows: a window wider than every length has no effect.
  constexpr int64_t kWidest = int64_t{1} << 32;
  int64_t const left = std::min(args.window_left.value_or(kWidest), kWidest);
  int64_t const right = causal == Causal::kNone ? std::min(args.window_right.value_or(kWidest), kWidest) : 0;
  auto const limited = [](int64_t limit) {
    return static_cast<int>(std::clamp(limit, int64_t{-kNoLimit}, int64_t{kNoLimit}));
  };
  // A limit that affects no row of this call is dropped, so that a wide enough window runs like no window.
  int64_t const longest = std::max(len_q, len_k);
  bool const has_lower = args.sequences ? left < longest : offset - left + len_q - 1 > 0;
  bool const has_upper = args.sequences ? right < longest : offset + right < len_k - 1;
  return {.lower = has_lower ? limited(offset - left) : -kNoLimit,
          .upper = has_upper ? limited(offset + right) : kNoLimit};
}

// The rules of the CUDA kernels beyond the common ones of check_fwd: 32-bit arithmetic on rows and keys must not
// overflow, nor what the kernels make of scale, cap and slopes in float32: their ratios, and squares of ratios' parts.
// A cap above 10^7 would leave no digits of the exponents.
inline void check_cuda_rules(FwdArgs const& args, Problem const& problem) {
  constexpr double kLeast = 1e-18, kMost = 1e18, kLargestCap = 1e7;
  FLASH_CUTE_CHECK(problem.len_q <= kMaxLength, "q: expected at most 10^9 rows on CUDA, got ", problem.len_q);
  FLASH_CUTE_CHECK(problem.len_k <= kMaxLength, args.k.name, ": expected at most 10^9 rows on CUDA, got ",
                   problem.len_k);
  FLASH_CUTE_CHECK(problem.scale >= kLeast && problem.scale <= kMost,
                   "scale: expected a number from 1e-18 to 1e18 on CUDA, got ", problem.scale);
  FLASH_CUTE_CHECK(problem.head_dim <= kLargestHeadDim, "q: expected a head dim of at most ", kLargestHeadDim,
                   " on CUDA, got ", problem.head_dim);
  FLASH_CUTE_CHECK(problem.head_dim_v <= kLargestHeadDim, args.v.name, ": expected a head dim of at most ",
                   kLargestHeadDim, " on CUDA, got ", problem.head_dim_v);
  FLASH_CUTE_CHECK(problem.softcap == 0 || (problem.softcap >= kLeast && problem.softcap <= kLargestCap),
                   "softcap: expected None or a number from 1e-18 to 1e7 on CUDA, got ", problem.softcap);
  double const ratio = problem.softcap > 0 ? problem.scale / problem.softcap : 1;
  FLASH_CUTE_CHECK(ratio >= kLeast && ratio <= kMost, "softcap: expected from 1e-18 to 1e18 times the scale ",
                   problem.scale, " on CUDA, got ", problem.softcap);
  FLASH_CUTE_CHECK(problem.asked.backend != Backend::kCpu,
                   "backend: expected 'auto', 'sm80' or 'sm90' for CUDA tensors, got '", args.backend, "'");
}

// float16 accumulators: a forward of the sm80 kernels with plain scores.
inline void check_accumulate(FwdArgs const& args, Problem const& problem, bool on_cuda) {
  if (problem.accumulate == AccumulateIn::kFloat32) return;
  char const* const name = kAccumulateNames[static_cast<int>(problem.accumulate)];
  FLASH_CUTE_CHECK(on_cuda || !is_cpu(args.q), "accumulate: expected 'float32' for CPU tensors, got '", name, "'");
  FLASH_CUTE_CHECK(args.q.dtype == aoti_torch_dtype_float16(), "accumulate: expected 'float32' for ",
                   dtype_name(args.q.dtype), " tensors, got '", name, "', which float16 ones take");
  FLASH_CUTE_CHECK(problem.asked.backend != Backend::kSm90, "accumulate: expected 'float32' for backend 'sm90', got '",
                   name, "', which 'sm80' has");
  FLASH_CUTE_CHECK(!problem.modifies_scores(),
                   "accumulate: expected 'float32' with softcap or alibi_slopes, got '", name, "'");
  FLASH_CUTE_CHECK(!problem.has_mask(), "accumulate: expected 'float32' with a mask, got '", name, "'");
  int const max_head_dim = sm80::forward::rows::float16_max_head_dim(problem.accumulate);
  FLASH_CUTE_CHECK(std::max(problem.head_dim, problem.head_dim_v) <= max_head_dim,
                   "accumulate: expected 'float32' for head dims above ", max_head_dim, ", got '", name, "'");
}

inline void check_cpu_backend(FwdArgs const& args, Problem const& problem) {
  FLASH_CUTE_CHECK(!is_cpu(args.q) || problem.asked.backend == Backend::kAuto || problem.asked.backend == Backend::kCpu,
                   "backend: expected 'auto' or 'cpu' for CPU tensors, got '", args.backend, "'");
  FLASH_CUTE_CHECK(!problem.row_invariant, "row_invariant: expected False for CPU tensors, got True");
}

// What the kernels of row-invariant forwards do not serve is refused: there are no others.
inline void check_row_invariant(Problem const& problem, Gpu gpu) {
  if (!problem.row_invariant) return;
  auto const expect = [](bool holds, auto const&... expected) {
    FLASH_CUTE_CHECK(holds, "row_invariant: expected ", expected..., ", or False; got True");
  };
  expect(gpu.capability == 90 && problem.asked.backend != Backend::kSm80, "a GPU of compute capability 9.0");
  expect(!problem.fp8, "tensors of float16 or bfloat16");
  expect(!problem.has_mask(), "no mask");
  expect(problem.softcap == 0, "no softcap");
  expect(!problem.has_alibi, "no alibi_slopes");
  expect(problem.accumulate == AccumulateIn::kFloat32, "sums in float32");
  expect(std::max(problem.head_dim, problem.head_dim_v) <= 256, "head dims up to 256");
}

// `on_cuda`: whether the CUDA rules apply: for CUDA tensors, and for a plan for a given GPU.
inline Problem check_fwd(FwdArgs const& args, bool on_cuda) {
  for (TensorInfo const* other : {&args.k, &args.v}) check_same_device(args.q, *other);
  check_dtype(args, on_cuda);
  check_shapes(args);
  if (args.fp8) check_fp8(args);
  if (args.sinks) check_sinks(args.q, *args.sinks, args.fp8.has_value());
  int64_t const batch = args.sequences.value_or(args.q.sizes[0]);
  if (args.alibi_slopes) check_alibi_slopes(args.q, *args.alibi_slopes, batch);
  Causal const causal = parse_causal(args.causal);
  Problem problem{.batch = static_cast<int>(batch),
                  .heads_q = static_cast<int>(args.q.sizes[1]),
                  .heads_kv = static_cast<int>(args.k.sizes[1]),
                  .len_q = static_cast<int>(args.q.sizes[2]),
                  .len_k = static_cast<int>(args.k.sizes[2]),
                  .head_dim = static_cast<int>(args.q.sizes[3]),
                  .head_dim_v = static_cast<int>(args.v.sizes[3]),
                  .packed = args.sequences.has_value(),
                  .bfloat16 = args.q.dtype == aoti_torch_dtype_bfloat16(),
                  .fp8 = args.fp8.has_value(),
                  .all_e4m3 = args.fp8 && !is_e5m2(args.q) && !is_e5m2(args.k) && !is_e5m2(args.v),
                  .scale = check_scale(args.q, args.scale),
                  .softcap = check_softcap(args.q, args.softcap),
                  .has_sinks = args.sinks.has_value(),
                  .has_alibi = args.alibi_slopes.has_value(),
                  .alibi_per_batch = args.alibi_slopes && args.alibi_slopes->rank == 2,
                  .causal = causal,
                  .band = make_band(args, causal, args.k.sizes[2])};
  if (args.mask) check_mask(args, problem);
  parse_backend(args.backend, problem);
  if (on_cuda) check_cuda_rules(args, problem);
  if (on_cuda && problem.fp8) check_fp8_cuda_rules(problem);
  check_accumulate(args, problem, on_cuda);
  if (!on_cuda) check_cpu_backend(args, problem);
  return problem;
}

// `other` must have `rank` dims, the first 3 of them q's.
inline void check_shape_of_rows(TensorInfo const& q, TensorInfo const& other, int rank, int64_t head_dim = 0) {
  int64_t const sizes[] = {q.sizes[0], q.sizes[1], q.sizes[2], head_dim};
  TensorInfo const expected{.name = other.name, .handle = nullptr, .sizes = sizes, .rank = rank, .packed = q.packed};
  bool const same = other.packed == q.packed && other.rank == rank && std::equal(sizes, sizes + rank, other.sizes);
  FLASH_CUTE_CHECK(same, other.name, ": expected the shape ", shape_text(expected), ", got ", shape_text(other));
}

inline void check_lse(TensorInfo const& q, TensorInfo const& lse) {
  bool const is_double = q.dtype == aoti_torch_dtype_float64();
  int32_t const dtype = is_double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  check_same_device(q, lse);
  FLASH_CUTE_CHECK(lse.dtype == dtype, lse.name, ": expected ", dtype_name(dtype), " for ", dtype_name(q.dtype),
                   " inputs, got ", dtype_name(lse.dtype));
  check_shape_of_rows(q, lse, 3);
}

// Gradients are computed from scores in float32, which those of a forward in float16 would not match.
inline void check_accumulate_of_bwd(Problem const& problem) {
  FLASH_CUTE_CHECK(problem.accumulate == AccumulateIn::kFloat32,
                   "accumulate: expected 'float32' where gradients are needed, got '",
                   kAccumulateNames[static_cast<int>(problem.accumulate)], "'");
}

inline Problem check_bwd(BwdArgs const& args, bool on_cuda) {
  Problem problem = check_fwd(args.call, on_cuda);
  check_accumulate_of_bwd(problem);
  for (TensorInfo const* other : {&args.dout, &args.out}) {
    check_same_device(args.call.q, *other);
    check_same_dtype(args.call.q, *other);
    check_shape_of_rows(args.call.q, *other, 4, problem.head_dim_v);
  }
  check_lse(args.call.q, args.lse);
  if (args.dlse) check_lse(args.call.q, *args.dlse);
  problem.deterministic = args.deterministic;
  problem.has_dlse = args.dlse.has_value();
  return problem;
}

}  // namespace flash_cute
