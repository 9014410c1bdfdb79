// q, k and v as other projects' interfaces have them, as views of what flash_cute takes.
#pragma once

#include "stack.h"

namespace flash_cute {

// A part of a tensor, as a view: at most 4 dims, and where it begins, in elements.
struct Part {
  int64_t rank;
  std::array<int64_t, 4> sizes, strides;
  int64_t first = 0;

  Tensor of(TensorInfo const& tensor) const {
    AtenTensorHandle handle = nullptr;
    check_shim(aoti_torch__reinterpret_tensor(tensor.handle, rank, sizes.data(), strides.data(), first, &handle),
               "take a view of a tensor");
    return Tensor(handle);
  }

  // (B, N, H, D) as (B, H, N, D), or the reverse.
  Part with_rows_and_heads_swapped() const {
    return {.rank = 4,
            .sizes = {sizes[0], sizes[2], sizes[1], sizes[3]},
            .strides = {strides[0], strides[2], strides[1], strides[3]},
            .first = first};
  }
};

inline Part whole(TensorInfo const& tensor) {
  FLASH_CUTE_CHECK(tensor.rank <= 4, tensor.name, ": expected at most 4 dims, got the shape ", shape_text(tensor));
  Part part{.rank = tensor.rank, .sizes = {}, .strides = {}};
  std::copy(tensor.sizes, tensor.sizes + tensor.rank, part.sizes.begin());
  std::copy(tensor.strides, tensor.strides + tensor.rank, part.strides.begin());
  return part;
}

// Heads [first, first + count) of (T, H, D) or (B, N, H, D).
inline Part heads_of(TensorInfo const& tensor, int64_t first, int64_t count) {
  Part part = whole(tensor);
  part.sizes[tensor.rank - 2] = count;
  part.first = first * tensor.strides[tensor.rank - 2];
  return part;
}

// The tensor at `index` of `count` stacked ones: (T, count, H, D) as (T, H, D), (B, N, count, H, D) as (B, N, H, D).
inline Part unstacked(TensorInfo const& tensor, int64_t index, int64_t count) {
  int64_t const rank = tensor.rank, stacked = rank - 3;
  FLASH_CUTE_CHECK((rank == 4 || rank == 5) && tensor.sizes[stacked] == count, tensor.name, ": expected ", count,
                   " stacked tensors in dim -3, got the shape ", shape_text(tensor));
  Part part{.rank = rank - 1, .sizes = {}, .strides = {}, .first = index * tensor.strides[stacked]};
  for (int64_t from = 0, to = 0; from < rank; ++from) {
    if (from == stacked) continue;
    part.sizes[to] = tensor.sizes[from];
    part.strides[to++] = tensor.strides[from];
  }
  return part;
}

// q, k and v. Or, where there is no v, k and v stacked in k; or, where there is no k either, all in q: stacked, or,
// with num_heads_q, their heads one after the other.
#define FLASH_CUTE_LAYER_TENSORS "Tensor q, Tensor? k, Tensor? v, int? num_heads_q"

// FLASH_CUTE_LAYER_TENSORS on the stack: a tensor each, once `separate` has been called.
struct LayerTensors {
  Tensor q, k, v;

  explicit LayerTensors(StackReader& stack)
      : q(stack.tensor()),
        k(stack.optional_tensor()),
        v(stack.optional_tensor()),
        num_heads_q_(stack.value<std::optional<int64_t>>()) {}

  // `rows_first`: (B, N, H, D) becomes (B, H, N, D).
  void separate(bool rows_first) {
    FLASH_CUTE_CHECK(!(k && num_heads_q_), "num_heads_q: expected None beside k, got ", *num_heads_q_);
    FLASH_CUTE_CHECK(k || !v, "k: expected a tensor beside v, got None");
    auto const take = [&](TensorInfo const& tensor, Part const& part) {
      if (!rows_first) return part.of(tensor);
      FLASH_CUTE_CHECK(part.rank == 4, tensor.name, ": expected (batch, length, heads, head_dim), got the shape ",
                       shape_text(tensor));
      return part.with_rows_and_heads_swapped().of(tensor);
    };
    auto const swap = [&](char const* name, Tensor& tensor) {
      if (!rows_first) return;
      TensorInfo const info = tensor_info(name, tensor.get());
      tensor = take(info, whole(info));
    };
    if (v) {
      swap("q", q);
      swap("k", k);
      swap("v", v);
    } else if (k) {
      Tensor const given = std::move(k);  // its sizes and strides are read to the end
      TensorInfo const kv = tensor_info("kv", given.get());
      swap("q", q);
      k = take(kv, unstacked(kv, 0, 2));
      v = take(kv, unstacked(kv, 1, 2));
    } else {
      Tensor const given = std::move(q);
      TensorInfo const qkv = tensor_info("qkv", given.get());
      std::array<Part, 3> const parts = num_heads_q_ ? split(qkv, *num_heads_q_) : unstack(qkv);
      q = take(qkv, parts[0]);
      k = take(qkv, parts[1]);
      v = take(qkv, parts[2]);
    }
  }

 private:
  static std::array<Part, 3> unstack(TensorInfo const& qkv) {
    return {unstacked(qkv, 0, 3), unstacked(qkv, 1, 3), unstacked(qkv, 2, 3)};
  }

  static std::array<Part, 3> split(TensorInfo const& qkv, int64_t num_heads_q) {
    FLASH_CUTE_CHECK(qkv.rank == 3 || qkv.rank == 4, "num_heads_q: expected None for qkv of the shape ",
                     shape_text(qkv));
    int64_t const heads = qkv.sizes[qkv.rank - 2], heads_kv = (heads - num_heads_q) / 2;
    FLASH_CUTE_CHECK(num_heads_q > 0 && heads_kv > 0 && num_heads_q + 2 * heads_kv == heads,
                     "num_heads_q: expected Hq of the Hq + 2 * Hkv = ", heads, " heads of qkv, got ", num_heads_q);
    return {heads_of(qkv, 0, num_heads_q), heads_of(qkv, num_heads_q, heads_kv),
            heads_of(qkv, num_heads_q + heads_kv, heads_kv)};
  }

  std::optional<int64_t> num_heads_q_;
};

// What other projects' interfaces have of mask and score; causal is aligned to the bottom right.
#define FLASH_CUTE_LAYER_SCORE \
  "bool is_causal, int? window_left, int? window_right, " FLASH_CUTE_SCORE

// FLASH_CUTE_LAYER_SCORE on the stack.
class LayerScore {
 public:
  explicit LayerScore(StackReader& stack)
      : is_causal_(stack.value<bool>()),
        window_left_(stack.value<std::optional<int64_t>>()),
        window_right_(stack.value<std::optional<int64_t>>()),
        softcap_(stack.value<std::optional<double>>()),
        sinks_(stack.optional_tensor()),
        alibi_slopes_(stack.optional_tensor()),
        scale_(stack.value<std::optional<double>>()) {}

  FwdArgs args(TensorInfo const& q, TensorInfo const& k, TensorInfo const& v) const {
    return {.q = q,
            .k = k,
            .v = v,
            .causal = is_causal_ ? "bottom_right" : "none",
            .window_left = window_left_,
            .window_right = window_right_,
            .softcap = softcap_,
            .sinks = optional_info("sinks", sinks_),
            .alibi_slopes = optional_info("alibi_slopes", alibi_slopes_),
            .scale = scale_,
            .backend = "auto",
            .sequences = std::nullopt};
  }

 private:
  bool is_causal_;
  std::optional<int64_t> window_left_, window_right_;
  std::optional<double> softcap_;
  Tensor sinks_, alibi_slopes_;  // null: none were given
  std::optional<double> scale_;
};

// What Transformers' models pass on; causal is aligned to the bottom right, and a window counts the row's own key.
#define FLASH_CUTE_MODEL_SCORE "bool is_causal, int? sliding_window, float? softcap, Tensor? sinks, float? scale"

// FLASH_CUTE_MODEL_SCORE on the stack.
class ModelScore {
 public:
  explicit ModelScore(StackReader& stack)
      : is_causal_(stack.value<bool>()),
        sliding_window_(stack.value<std::optional<int64_t>>()),
        softcap_(stack.value<std::optional<double>>()),
        sinks_(stack.optional_tensor()),
        scale_(stack.value<std::optional<double>>()) {}

  FwdArgs args(TensorInfo const& q, TensorInfo const& k, TensorInfo const& v) const {
    std::optional<int64_t> const side = sliding_window_ ? std::optional(*sliding_window_ - 1) : std::nullopt;
    return {.q = q,
            .k = k,
            .v = v,
            .causal = is_causal_ ? "bottom_right" : "none",
            .window_left = side,
            .window_right = side,
            .softcap = softcap_,
            .sinks = optional_info("sinks", sinks_),
            .alibi_slopes = std::nullopt,
            .scale = scale_,
            .backend = "auto",
            .sequences = std::nullopt};
  }

 private:
  bool is_causal_;
  std::optional<int64_t> sliding_window_;
  std::optional<double> softcap_;
  Tensor sinks_;  // null: none were given
  std::optional<double> scale_;
};

}  // namespace flash_cute
