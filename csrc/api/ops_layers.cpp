// Forwards in the arguments of other projects' interfaces, for flash_cute/integrations: what those would do in Python
// (transposed views, checks of shapes, strings) costs several microseconds a call there, and a fraction of one here.
// They have no autograd, and are called where none is needed.
//
//   _sdpa       scaled_dot_product_attention without mask and dropout: (B, H, N, D), causal aligned to the top left.
//               Refuses what flash_cute and PyTorch would answer differently: empty tensors, and key heads that are
//               neither query's, nor one, nor allowed by enable_gqa
//   _rows_fwd   returns out as (B, N, H, Dv), and the LSE as fwd does. `rows_first`: q, k and v are (B, N, H, D), as
//               flash-attn has them; else (B, H, N, D), as Transformers has them. causal is aligned to the bottom right
//
// CPU kernels and fakes are registered from Python.
#include "fwd.h"
#include "stack.h"

namespace flash_cute {
namespace {

// (B, N, H, D) as (B, H, N, D), or the reverse: a view.
Tensor swap_rows_and_heads(TensorInfo const& tensor) {
  FLASH_CUTE_CHECK(tensor.rank == 4, tensor.name, ": expected 4 dims, got the shape ", shape_text(tensor));
  int64_t const* const sizes = tensor.sizes;
  int64_t const* const strides = tensor.strides;
  std::array<int64_t, 4> const swapped_sizes{sizes[0], sizes[2], sizes[1], sizes[3]};
  std::array<int64_t, 4> const swapped_strides{strides[0], strides[2], strides[1], strides[3]};
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch__reinterpret_tensor(tensor.handle, 4, swapped_sizes.data(), swapped_strides.data(), 0, &handle),
             "take a view of a tensor");
  return Tensor(handle);
}

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
                       .scale = scale_,
                       .backend = "auto"};
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
  explicit RowsStack(StackReader& stack)
      : q_(stack.tensor()),
        k_(stack.tensor()),
        v_(stack.tensor()),
        rows_first_(stack.value<bool>()),
        is_causal_(stack.value<bool>()),
        window_left_(stack.value<std::optional<int64_t>>()),
        window_right_(stack.value<std::optional<int64_t>>()),
        softcap_(stack.value<std::optional<double>>()),
        sinks_(stack.optional_tensor()),
        scale_(stack.value<std::optional<double>>()) {
    if (!rows_first_) return;
    q_ = swap_rows_and_heads(tensor_info("q", q_.get()));
    k_ = swap_rows_and_heads(tensor_info("k", k_.get()));
    v_ = swap_rows_and_heads(tensor_info("v", v_.get()));
  }

  FwdArgs args() const {
    return {.q = tensor_info("q", q_.get()),
            .k = tensor_info("k", k_.get()),
            .v = tensor_info("v", v_.get()),
            .causal = is_causal_ ? "bottom_right" : "none",
            .window_left = window_left_,
            .window_right = window_right_,
            .softcap = softcap_,
            .sinks = optional_info("sinks", sinks_),
            .scale = scale_,
            .backend = "auto"};
  }

 private:
  Tensor q_, k_, v_;  // (B, H, N, D), once constructed
  bool rows_first_, is_causal_;
  std::optional<int64_t> window_left_, window_right_;
  std::optional<double> softcap_;
  Tensor sinks_;  // null: none were given
  std::optional<double> scale_;
};

void boxed_sdpa(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  SdpaStack const owned(reader);
  stack[0] = stable::from(fwd_cuda(owned.args()).out.release());
}

void boxed_rows_fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  RowsStack const owned(reader);
  FwdResult result = fwd_cuda(owned.args());
  stack[0] = stable::from(swap_rows_and_heads(tensor_info("out", result.out.get())).release());
  stack[1] = stable::from(result.lse.release());
}

}  // namespace
}  // namespace flash_cute

STABLE_TORCH_LIBRARY_FRAGMENT(flash_cute, m) {
  m.def("_sdpa(Tensor query, Tensor key, Tensor value, bool is_causal, float? scale, bool enable_gqa) -> Tensor");
  m.def(
      "_rows_fwd(Tensor q, Tensor k, Tensor v, bool rows_first, bool is_causal, int? window_left, int? window_right, "
      "float? softcap, Tensor? sinks, float? scale) -> (Tensor out, Tensor lse)");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, m) {
  m.impl("_sdpa", &flash_cute::boxed_sdpa);
  m.impl("_rows_fwd", &flash_cute::boxed_rows_fwd);
}
