// The forward of packed sequences in the arguments of other projects' interfaces; see ops_layers.cpp, which has the
// dense ones.
//
//   _rows_varlen_fwd   flash-attn's: q, k and v (T, H, D), or stacked (layer_views.h): out and LSE as varlen_fwd
//                      returns them
//   _heads_varlen_fwd  Transformers': q, k and v (B, H, N, D), returns out alone, as (B, N, Hq, Dv). The offsets count
//                      the B * N rows of all batch items. A tensor is copied in which the rows of a batch item do not
//                      follow those of the one before it at one stride, such as a contiguous one.
//   _cache_varlen_fwd  the same for one row of q over contiguous k and v, as a cache holds them, of which
//                      _heads_varlen_fwd makes copies: a sequence is a KV head of a batch item, with the query heads
//                      that it serves, and the offsets count the B * Hkv * N rows of all of them. What is not
//                      contiguous is copied. An operator and not an argument, which costs every call 0.3 us
#include "layer_views.h"
#include "operand.h"
#include "varlen_stack.h"

namespace flash_cute {
namespace {

// (B, H, N, D) as packed rows: (B * N, H, D), or, of sequences of `heads` heads, (B * H / heads * N, heads, D).
class PackedRows {
 public:
  PackedRows() = default;
  PackedRows(PackedRows const&) = delete;  // `packed_` points into it

  void set(TensorInfo const& tensor) {
    start(tensor);
    int64_t const batch = tensor.sizes[0], rows = tensor.sizes[2];
    strides_ = {rows == 1 ? tensor.strides[0] : tensor.strides[2], tensor.strides[1], tensor.strides[3]};
    sizes_ = {batch * rows, tensor.sizes[1], tensor.sizes[3]};
    needs_copy_ = batch > 1 && rows > 1 && tensor.strides[0] != rows * tensor.strides[2];
    if (needs_copy_) strides_ = contiguous_strides(sizes_);
    copy_strides_ = {rows * strides_[0], strides_[1], strides_[0], strides_[2]};
  }

  // One of `heads` and the tensor's rows is 1.
  void set_by_heads(TensorInfo const& tensor, int64_t heads) {
    start(tensor);
    sizes_ = {tensor.sizes[0] * (tensor.sizes[1] / heads) * tensor.sizes[2], heads, tensor.sizes[3]};
    strides_ = {heads * tensor.sizes[3], tensor.sizes[3], 1};
    copy_strides_ = contiguous_strides<4>({tensor.sizes[0], tensor.sizes[1], tensor.sizes[2], tensor.sizes[3]});
    needs_copy_ = false;
    for (int dim = 0; dim < 4; ++dim) {
      needs_copy_ |= tensor.sizes[dim] > 1 && tensor.strides[dim] != copy_strides_[dim];
    }
  }

  bool needs_copy() const { return needs_copy_; }
  // Not to be read where a copy is needed, and has not been made.
  TensorInfo const& info() const { return packed_; }

  void copy() {
    int64_t const* const sizes = given_.sizes;
    copy_ = empty_strided<4>({sizes[0], sizes[1], sizes[2], sizes[3]}, copy_strides_, given_.dtype, given_);
    copy_into(copy_.get(), given_.handle);
    packed_.handle = copy_.get();
  }

 private:
  void start(TensorInfo const& tensor) {
    FLASH_CUTE_CHECK(tensor.rank == 4, tensor.name, ": expected 4 dims, got the shape ", shape_text(tensor));
    given_ = packed_ = tensor;
    packed_.sizes = sizes_.data();
    packed_.strides = strides_.data();
    packed_.rank = 3;
  }

  TensorInfo given_{}, packed_{};
  std::array<int64_t, 3> sizes_{}, strides_{};
  std::array<int64_t, 4> copy_strides_{};  // of the dims that were given
  bool needs_copy_ = false;
  Tensor copy_;  // (B, H, N, D), the packed rows one after the other; null: none was needed
};

class RowsVarlenStack {
 public:
  explicit RowsVarlenStack(StackReader& stack) : tensors_(stack), lengths_(stack), score_(stack) {
    tensors_.separate(/*rows_first=*/false);
  }

  VarlenFwdArgs args() {
    VarlenArgs const lengths = lengths_.args();
    FwdArgs const call = score_.args(tensor_info("q", tensors_.q.get()), tensor_info("k", tensors_.k.get()),
                                     tensor_info("v", tensors_.v.get()));
    return {.call = pack(call, lengths, views_), .lengths = lengths};
  }

 private:
  LayerTensors tensors_;
  LengthsStack lengths_;
  LayerScore score_;
  std::array<PackedView, 3> views_;
};

class HeadsVarlenStack {
 public:
  HeadsVarlenStack(StackReader& stack, bool by_heads)
      : q_(stack.tensor()),
        k_(stack.tensor()),
        v_(stack.tensor()),
        lengths_(stack),
        score_(stack),
        by_heads_(by_heads) {
    TensorInfo const q = tensor_info("q", q_.get()), k = tensor_info("k", k_.get()), v = tensor_info("v", v_.get());
    if (by_heads_) {
      set_by_heads(q, k, v);
      return;
    }
    rows_q_.set(q);
    rows_k_.set(k);
    rows_v_.set(v);
  }

  VarlenFwdArgs args() {
    VarlenArgs const lengths = lengths_.args();
    auto const packed = [&] {
      return VarlenFwdArgs{.call = pack(score_.args(rows_q_.info(), rows_k_.info(), rows_v_.info()), lengths, views_),
                           .lengths = lengths};
    };
    if (!(rows_q_.needs_copy() || rows_k_.needs_copy() || rows_v_.needs_copy())) return packed();
    VarlenFwdArgs const uncopied = packed();
    check_varlen_fwd(uncopied, is_cuda(uncopied.call.q));  // a refusal launches nothing
    for (PackedRows* rows : {&rows_q_, &rows_k_, &rows_v_}) {
      if (rows->needs_copy()) rows->copy();
    }
    return packed();
  }

  // out, (B * N, Hq, Dv), as (B, N, Hq, Dv); or by heads, (B * Hkv, Hq / Hkv, Dv), N being 1.
  Tensor unpack(Tensor const& out) const {
    TensorInfo const q = tensor_info("q", q_.get()), rows = tensor_info("out", out.get());
    int64_t const sequences = by_heads_ ? q.sizes[1] / std::max<int64_t>(1, rows.sizes[1]) : 1;  // of a batch item
    int64_t const head = rows.sizes[1] == 1 && by_heads_ ? rows.strides[0] : rows.strides[1];
    Part const batches{.rank = 4,
                       .sizes = {q.sizes[0], q.sizes[2], q.sizes[1], rows.sizes[2]},
                       .strides = {q.sizes[2] * sequences * rows.strides[0], rows.strides[0], head, rows.strides[2]}};
    return batches.of(rows);
  }

 private:
  void set_by_heads(TensorInfo const& q, TensorInfo const& k, TensorInfo const& v) {
    for (TensorInfo const* tensor : {&q, &k, &v}) {
      FLASH_CUTE_CHECK(tensor->rank == 4, tensor->name, ": expected 4 dims, got the shape ", shape_text(*tensor));
    }
    FLASH_CUTE_CHECK(q.sizes[2] == 1, "q: expected one row by heads, got ", q.sizes[2]);
    for (TensorInfo const* tensor : {&k, &v}) {
      FLASH_CUTE_CHECK(tensor->sizes[0] == q.sizes[0], tensor->name, ": expected q's batch size ", q.sizes[0], ", got ",
                       tensor->sizes[0]);
      FLASH_CUTE_CHECK(tensor->sizes[1] > 0 && tensor->sizes[1] == k.sizes[1] && q.sizes[1] % tensor->sizes[1] == 0,
                       tensor->name, ": expected a number of heads that divides q's ", q.sizes[1], ", got ",
                       tensor->sizes[1]);
    }
    rows_q_.set_by_heads(q, std::max<int64_t>(1, q.sizes[1] / k.sizes[1]));
    rows_k_.set_by_heads(k, 1);
    rows_v_.set_by_heads(v, 1);
  }

  Tensor q_, k_, v_;
  LengthsStack lengths_;
  ModelScore score_;
  bool by_heads_;
  PackedRows rows_q_, rows_k_, rows_v_;
  std::array<PackedView, 3> views_;
};

void boxed_rows_varlen_fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  RowsVarlenStack owned(reader);
  FwdResult result = varlen_fwd_cuda(owned.args());
  stack[0] = stable::from(result.out.release());
  stack[1] = stable::from(result.lse.release());
}

template <bool kByHeads>
void boxed_heads_varlen_fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  HeadsVarlenStack owned(reader, kByHeads);
  stack[0] = stable::from(owned.unpack(varlen_fwd_cuda(owned.args()).out).release());
}

}  // namespace
}  // namespace flash_cute

#define FLASH_CUTE_MODEL_VARLEN "Tensor q, Tensor k, Tensor v, " FLASH_CUTE_LENGTHS ", " FLASH_CUTE_MODEL_SCORE

STABLE_TORCH_LIBRARY_FRAGMENT(flash_cute, m) {
  m.def("_rows_varlen_fwd(" FLASH_CUTE_LAYER_TENSORS ", " FLASH_CUTE_LENGTHS ", " FLASH_CUTE_LAYER_SCORE
        ") -> (Tensor out, Tensor lse)");
  m.def("_heads_varlen_fwd(" FLASH_CUTE_MODEL_VARLEN ") -> Tensor");
  m.def("_cache_varlen_fwd(" FLASH_CUTE_MODEL_VARLEN ") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, m) {
  m.impl("_rows_varlen_fwd", &flash_cute::boxed_rows_varlen_fwd);
  m.impl("_heads_varlen_fwd", &flash_cute::boxed_heads_varlen_fwd<false>);
  m.impl("_cache_varlen_fwd", &flash_cute::boxed_heads_varlen_fwd<true>);
}
