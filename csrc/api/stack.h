// What the operators' boxed functions have in common: reading PyTorch's stack, and the arguments of mask and score.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>
#include <vector>

#include "checks.h"

namespace flash_cute {

namespace stable = torch::stable::detail;

// Reads the arguments that PyTorch puts on the stack, and takes ownership of them. Boxed by hand, since in torch 2.11
// TORCH_BOX leaks every str argument.
class StackReader {
 public:
  explicit StackReader(StableIValue const* stack) : next_(stack) {}

  template <class T>
  T value() {
    return stable::to<T>(*next_++);
  }
  Tensor tensor() { return Tensor(value<AtenTensorHandle>()); }
  Tensor optional_tensor() { return Tensor(value<std::optional<AtenTensorHandle>>().value_or(nullptr)); }
  String string() { return String(value<StringHandle>()); }

 private:
  StableIValue const* next_;
};

inline std::optional<TensorInfo> optional_info(char const* name, Tensor const& tensor) {
  return tensor ? std::optional(tensor_info(name, tensor.get())) : std::nullopt;
}

#define FLASH_CUTE_MASK "str causal, int? window_left, int? window_right"
#define FLASH_CUTE_SCORE "float? softcap, Tensor? sinks, Tensor? alibi_slopes, float? scale"

// FLASH_CUTE_MASK and FLASH_CUTE_SCORE on the stack. The members of this and of the classes that hold it are declared,
// and so read, in the schema's order.
class ScoreStack {
 public:
  explicit ScoreStack(StackReader& stack)
      : causal_(stack.string()),
        window_left_(stack.value<std::optional<int64_t>>()),
        window_right_(stack.value<std::optional<int64_t>>()),
        softcap_(stack.value<std::optional<double>>()),
        sinks_(stack.optional_tensor()),
        alibi_slopes_(stack.optional_tensor()),
        scale_(stack.value<std::optional<double>>()) {}

  FwdArgs args(Tensor const& q, Tensor const& k, Tensor const& v, String const& backend) const {
    return {.q = tensor_info("q", q.get()),
            .k = tensor_info("k", k.get()),
            .v = tensor_info("v", v.get()),
            .causal = view(causal_),
            .window_left = window_left_,
            .window_right = window_right_,
            .softcap = softcap_,
            .sinks = optional_info("sinks", sinks_),
            .alibi_slopes = optional_info("alibi_slopes", alibi_slopes_),
            .scale = scale_,
            .backend = view(backend),
            .sequences = std::nullopt};
  }

 private:
  String causal_;
  std::optional<int64_t> window_left_, window_right_;
  std::optional<double> softcap_;
  Tensor sinks_, alibi_slopes_;  // null: none was given
  std::optional<double> scale_;
};

inline TensorInfo* if_given(std::optional<TensorInfo>& tensor) { return tensor ? &*tensor : nullptr; }

// A fake tensor is checked through a stand-in on the meta device: sets each tensor's device to the next of `names`.
// A null pointer stands for a tensor that was not given, which has no name.
inline void set_devices(std::string_view names, std::vector<TensorInfo*> const& tensors) {
  for (TensorInfo* tensor : tensors) {
    if (names.empty()) return;
    if (tensor == nullptr) continue;
    size_t const end = std::min(names.find(' '), names.size());
    std::string_view const name = names.substr(0, end);
    names.remove_prefix(std::min(end + 1, names.size()));
    size_t const colon = std::min(name.find(':'), name.size());
    std::string_view const type = name.substr(0, colon);
    tensor->device_type = type == "cuda"   ? aoti_torch_device_type_cuda()
                          : type == "cpu"  ? aoti_torch_device_type_cpu()
                          : type == "meta" ? aoti_torch_device_type_meta()
                                           : -1;
    tensor->device_index = -1;
    if (colon == name.size()) continue;
    // Not std::stoi: under the headers of glibc 2.38 and later it calls a symbol that older systems do not have.
    char const* const last = name.data() + name.size();
    auto const [end_of_number, error] = std::from_chars(name.data() + colon + 1, last, tensor->device_index);
    FLASH_CUTE_CHECK(error == std::errc() && end_of_number == last, "devices: expected 'cuda:0', got '", name, "'");
  }
}

}  // namespace flash_cute
