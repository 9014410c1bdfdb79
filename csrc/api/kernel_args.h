// Parts of the kernels' parameters that both directions have: the workspace, where the sequences are, the terms of the
// score, sinks, factors of float8 tensors.
#pragma once

#include "operand.h"
#include "varlen.h"

namespace flash_cute {

// The memory of a workspace, if the plan has one.
class Workspace {
 public:
  Workspace(int64_t bytes, TensorInfo const& like) {
    if (bytes == 0) return;
    tensor_ = empty_strided<1>({bytes}, {1}, aoti_torch_dtype_uint8(), like);
    begin_ = static_cast<char*>(mutable_data_pointer(tensor_.get()));
  }

  // Null where the plan has no such part.
  template <class T>
  T* part(int64_t offset) const {
    return offset == kNoPart ? nullptr : reinterpret_cast<T*>(begin_ + offset);
  }

 private:
  Tensor tensor_;
  char* begin_ = nullptr;
};

// Row i of a dense batch has the position i + shift.
inline int dense_shift(Problem const& problem) {
  return problem.causal != Causal::kTopLeft ? problem.len_k - problem.len_q : 0;
}

// Where the sequences of a call are, for a kernel that reads them at run time. `lengths` null: a dense batch.
inline Sequences make_sequences(FwdArgs const& args, Problem const& problem, VarlenArgs const* lengths) {
  auto const limit = [](std::optional<int64_t> side) {
    return static_cast<int>(std::min<int64_t>(side.value_or(kNoLimit), kNoLimit));
  };
  Sequences sequences{.window_left = limit(args.window_left),
                      .window_right = problem.causal == Causal::kNone ? limit(args.window_right) : 0,
                      .bottom_right = problem.causal != Causal::kTopLeft};
  sequences.shift = dense_shift(problem);
  if (lengths == nullptr) return sequences;
  auto const data = [](TensorInfo const& tensor) { return static_cast<int const*>(data_pointer(tensor.handle)); };
  sequences.cu_q = data(lengths->cu_seqlens_q);
  sequences.cu_k = data(lengths->cu_seqlens_k);
  if (lengths->seqused_q) sequences.used_q = data(*lengths->seqused_q);
  if (lengths->seqused_k) sequences.used_k = data(*lengths->seqused_k);
  return sequences;
}

inline ScoreTerms make_score_terms(FwdArgs const& args, Problem const& problem) {
  bool const capped = problem.softcap > 0;
  double const softcap_scale = capped ? problem.scale / problem.softcap : 0;
  ScoreTerms terms{.softcap_scale = static_cast<float>(softcap_scale),
                   .softcap = softcap_polynomial(softcap_scale, problem.softcap * kLog2E, problem.len_k),
                   .slope_factor = static_cast<float>(1 / (capped ? problem.softcap : problem.scale))};
  if (!args.alibi_slopes) return terms;
  TensorInfo const& slopes = *args.alibi_slopes;
  terms.slopes = static_cast<float const*>(data_pointer(slopes.handle));
  terms.slopes_batch_stride = problem.alibi_per_batch ? slopes.strides[0] : 0;
  terms.slopes_head_stride = slopes.strides[slopes.rank - 1];
  return terms;
}

// What an exponent is a multiple of: the scale or, of capped scores, the cap; times log2(e).
inline float make_scale_log2(Problem const& problem) {
  return static_cast<float>((problem.softcap > 0 ? problem.softcap : problem.scale) * kLog2E);
}

inline Sinks make_sinks(FwdArgs const& args) {
  if (!args.sinks) return {};
  return {.data = data_pointer(args.sinks->handle),
          .stride = args.sinks->strides[0],
          .is_float32 = args.sinks->dtype == aoti_torch_dtype_float32()};
}

// `heads_per_pair`: the query heads that share an entry of a descale of two dims.
inline Descale make_descale(std::optional<TensorInfo> const& tensor, int heads_per_pair) {
  Descale descale{.data = nullptr, .batch_stride = 0, .head_stride = 0, .block_stride = 0, .blocks = 1,
                  .heads_per_entry = 1};
  if (!tensor) return descale;
  descale.data = static_cast<float const*>(data_pointer(tensor->handle));
  if (is_one_number(*tensor)) return descale;
  descale.batch_stride = tensor->strides[0];
  descale.head_stride = tensor->strides[1];
  if (tensor->rank == 2) {
    descale.heads_per_entry = heads_per_pair;
  } else {
    descale.block_stride = tensor->strides[2];
    descale.blocks = static_cast<int>(std::clamp<int64_t>(tensor->sizes[2], 1, INT_MAX));
  }
  return descale;
}

// Of a call of float8 tensors.
inline Fp8Terms make_fp8_terms(FwdArgs const& args, Problem const& problem) {
  Fp8Args const& fp8 = *args.fp8;
  return {.q_is_e5m2 = is_e5m2(args.q),
          .k_is_e5m2 = is_e5m2(args.k),
          .v_is_e5m2 = is_e5m2(args.v),
          .out_type = parse_out_type(fp8.out_dtype),
          .exact_lse = fp8.exact_lse,
          .q = make_descale(fp8.descale_q, problem.heads_q / std::max(1, problem.heads_kv)),
          .k = make_descale(fp8.descale_k, 1),
          .v = make_descale(fp8.descale_v, 1),
          .out = make_descale(fp8.descale_out, 1)};
}

}  // namespace flash_cute
