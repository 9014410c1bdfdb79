// The operator that quantises to float8, and its schema.
//
//   quantize_fp8        x, (B, H, N, D), or with `cu_seqlens` packed (rows, H, D), as float8 and float32 descales:
//                       per "head"     (B, heads_kv): of the H / heads_kv heads of a group
//                       per "block"    (B, H, ceil(N / 128)): of 128 rows of a sequence; of packed sequences of
//                                      ceil(max_seqlen / 128), or of all rows
//                       per "channel"  (B, heads_kv, D)
//                       `name` says which of q, k and v x is, for messages. With `center` x less its mean over the
//                       rows, which is returned, else (0,). With `seed` x is rotated first, and so is that mean. With
//                       `key_mean`, what k's quantisation returned, `shift` is its product with each row of x,
//                       (B, H, N) or packed (H, rows), else (0,)
//   check_quantize_fp8  raises what quantize_fp8 would raise; `devices` as in check_fwd, see ops.cpp
//
// The CPU kernel is registered from Python.
#include "quantize.h"
#include "stack.h"

namespace flash_cute {
namespace {

class QuantizeStack {
 public:
  explicit QuantizeStack(StackReader& stack)
      : x_(stack.tensor()),
        name_(stack.string()),
        dtype_(stack.string()),
        per_(stack.string()),
        heads_kv_(stack.value<int64_t>()),
        center_(stack.value<bool>()),
        seed_(stack.value<std::optional<int64_t>>()),
        key_mean_(stack.optional_tensor()),
        cu_seqlens_(stack.optional_tensor()),
        max_seqlen_(stack.value<std::optional<int64_t>>()) {}

  QuantizeArgs args() {
    std::string_view const name = view(name_);
    FLASH_CUTE_CHECK(name == "q" || name == "k" || name == "v", "name: expected 'q', 'k' or 'v', got '", name, "'");
    TensorInfo const x = tensor_info(name == "q" ? "q" : name == "k" ? "k" : "v", x_.get());
    return {.x = cu_seqlens_ ? view_.info(x, 3) : x,
            .dtype = view(dtype_),
            .per = view(per_),
            .heads_kv = heads_kv_,
            .center = center_,
            .seed = seed_,
            .key_mean = optional_info("key_mean", key_mean_),
            .cu_seqlens = optional_info(name == "q" ? "cu_seqlens_q" : "cu_seqlens_k", cu_seqlens_),
            .max_seqlen = max_seqlen_};
  }

 private:
  Tensor x_;
  String name_, dtype_, per_;
  int64_t heads_kv_;
  bool center_;
  std::optional<int64_t> seed_;
  Tensor key_mean_, cu_seqlens_;  // null: none was given
  std::optional<int64_t> max_seqlen_;
  PackedView view_;
};

void boxed_quantize(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  QuantizeStack owned(reader);
  QuantizeResult result = quantize_cuda(owned.args());
  stack[0] = stable::from(result.out.release());
  stack[1] = stable::from(result.descale.release());
  stack[2] = stable::from(result.mean.release());
  stack[3] = stable::from(result.shift.release());
}

void boxed_check_quantize(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  QuantizeStack owned(reader);
  String const devices = reader.string();
  QuantizeArgs args = owned.args();
  set_devices(view(devices), {&args.x, if_given(args.key_mean), if_given(args.cu_seqlens)});
  check_quantize(args);
}

}  // namespace
}  // namespace flash_cute

// SymInt, so that torch.compile makes no graph per value.
#define FLASH_CUTE_QUANTIZE                                                                                     \
  "Tensor x, str name, str dtype, str per, SymInt heads_kv, bool center, int? seed, Tensor? key_mean, Tensor? " \
  "cu_seqlens, SymInt? max_seqlen"

STABLE_TORCH_LIBRARY_FRAGMENT(flash_cute, m) {
  m.def("quantize_fp8(" FLASH_CUTE_QUANTIZE ") -> (Tensor out, Tensor descale, Tensor mean, Tensor shift)");
  m.def("check_quantize_fp8(" FLASH_CUTE_QUANTIZE ", str devices=\"\") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, m) { m.impl("quantize_fp8", &flash_cute::boxed_quantize); }

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, m) {
  m.impl("check_quantize_fp8", &flash_cute::boxed_check_quantize);
}
