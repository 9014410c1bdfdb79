// Forwards in the arguments of other projects' interfaces, for flash_cute/integrations: what those would do in Python
// (transposed views, checks of shapes, strings) costs several microseconds per call there, and a fraction of one here.
// They have no autograd, and are called where none is needed.
//
//   _sdpa       scaled_dot_product_attention without mask and dropout: (B, H, N, D), causal aligned to the top left.
//               Refuses what flash_cute and PyTorch would answer differently: empty tensors, and key heads that are
//               neither query's, nor one, nor allowed by enable_gqa
//   _rows_fwd   flash-attn's: q, k and v (B, N, H, D), or in one tensor: k and v in k (B, N, 2, Hkv, D), or all in q,
//               (B, N, 3, H, D) or (B, N, Hq + 2 * Hkv, D) with Hq given as num_heads_q. Returns out as (B, N, H, Dv),
//               and the LSE as fwd does. causal is aligned to the bottom right
//   _heads_fwd  Transformers': q, k and v (B, H, N, D), returns out alone, as (B, N, H, Dv). causal is aligned to the
//               bottom right. One of its own: without the LSE, slopes and stacked tensors a call takes 1 us less
//
// Those of packed sequences are in ops_layers_varlen.cpp.
//
// CPU kernels and fakes are registered from Python.
#include "fwd.h"
#include "layer_views.h"

namespace flash_cute {
namespace {

class SdpaStack {
 public:
  explicit SdpaStack(StackReader& stack)
      : q_(stack.tensor()),
        k_(stack.tensor()),
        v_(stack.tensor()),
        is_causal_(stack.value<bool>()),
        scale_(stack.value<std::optional<double>>()),
        enable_gqa_(stack.value<bool>()) {}

  FwdArgs args() const {
    FwdArgs const args{.q = tensor_info("q", q_.get()),
                       .k = tensor_info("k", k_.get()),
                       .v = tensor_info("v", v_.get()),
                       .causal = is_causal_ ? "top_left" : "none",
                       .window_left = std::nullopt,
                       .window_right = std::nullopt,
                       .softcap = std::nullopt,
                       .sinks = std::nullopt,
                       .alibi_slopes = std::nullopt,
                       .scale = scale_,
                       .backend = "auto",
                       .sequences = std::nullopt};
    for (TensorInfo const* tensor : {&args.q, &args.k, &args.v}) {
      FLASH_CUTE_CHECK(tensor->rank == 4, tensor->name, ": expected 4 dims, got the shape ", shape_text(*tensor));
      bool const is_empty = std::find(tensor->sizes, tensor->sizes + 4, 0) != tensor->sizes + 4;
      FLASH_CUTE_CHECK(!is_empty, tensor->name, ": expected no dim of size 0, got the shape ", shape_text(*tensor));
    }
    int64_t const heads = args.q.sizes[1], heads_kv = args.k.sizes[1];
    FLASH_CUTE_CHECK(heads_kv == heads || heads_kv == 1 || enable_gqa_, "enable_gqa: expected True for ", heads,
                     " query heads and ", heads_kv, " key heads, got False");
    return args;
  }

 private:
  Tensor q_, k_, v_;
  bool is_causal_;
  std::optional<double> scale_;
  bool enable_gqa_;
};

class RowsStack {
 public:
  explicit RowsStack(StackReader& stack) : tensors_(stack), score_(stack) { tensors_.separate(/*rows_first=*/true); }

  FwdArgs args() const {
    return score_.args(tensor_info("q", tensors_.q.get()), tensor_info("k", tensors_.k.get()),
                       tensor_info("v", tensors_.v.get()));
  }

 private:
  LayerTensors tensors_;  // (B, H, N, D), once constructed
  LayerScore score_;
};

class HeadsStack {
 public:
  explicit HeadsStack(StackReader& stack)
      : q_(stack.tensor()), k_(stack.tensor()), v_(stack.tensor()), score_(stack) {}

  FwdArgs args() const {
    return score_.args(tensor_info("q", q_.get()), tensor_info("k", k_.get()), tensor_info("v", v_.get()));
  }

 private:
  Tensor q_, k_, v_;
  ModelScore score_;
};

// (B, H, N, D) as (B, N, H, D).
Tensor rows_first(Tensor const& tensor) {
  TensorInfo const out = tensor_info("out", tensor.get());
  return whole(out).with_rows_and_heads_swapped().of(out);
}

void boxed_sdpa(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  SdpaStack const owned(reader);
  stack[0] = stable::from(fwd_cuda(owned.args()).out.release());
}

void boxed_rows_fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  RowsStack const owned(reader);
  FwdResult result = fwd_cuda(owned.args());
  stack[0] = stable::from(rows_first(result.out).release());
  stack[1] = stable::from(result.lse.release());
}

void boxed_heads_fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  HeadsStack const owned(reader);
  stack[0] = stable::from(rows_first(fwd_cuda(owned.args()).out).release());
}

}  // namespace
}  // namespace flash_cute

STABLE_TORCH_LIBRARY_FRAGMENT(flash_cute, m) {
  m.def("_sdpa(Tensor query, Tensor key, Tensor value, bool is_causal, float? scale, bool enable_gqa) -> Tensor");
  m.def("_rows_fwd(" FLASH_CUTE_LAYER_TENSORS ", " FLASH_CUTE_LAYER_SCORE ") -> (Tensor out, Tensor lse)");
  m.def("_heads_fwd(Tensor q, Tensor k, Tensor v, " FLASH_CUTE_MODEL_SCORE ") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, m) {
  m.impl("_sdpa", &flash_cute::boxed_sdpa);
  m.impl("_rows_fwd", &flash_cute::boxed_rows_fwd);
  m.impl("_heads_fwd", &flash_cute::boxed_heads_fwd);
}
