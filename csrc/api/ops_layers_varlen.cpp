// The forward of packed sequences in the arguments of other projects' interfaces; see ops_layers.cpp, which has the
// dense ones.
//
//   _rows_varlen_fwd   q, k and v (T, H, D), as flash-attn has them: out and LSE as varlen_fwd returns them. Or
//                      (B, H, N, D), as Transformers has them: the offsets then count the B * N rows of all batch
//                      items, out is (B, N, Hq, Dv), and the LSE (Hq, B * N). Of these a tensor is copied in which the
//                      rows of a batch item do not follow those of the one before it at one stride, such as a
//                      contiguous one
#include "layer_views.h"
#include "operand.h"
#include "varlen_stack.h"

namespace flash_cute {
namespace {

// A tensor as packed rows: one of 4 dims, (B, H, N, D), as (B * N, H, D).
class PackedRows {
 public:
  PackedRows() = default;
  PackedRows(PackedRows const&) = delete;  // `packed_` points into it

  void set(TensorInfo const& tensor) {
    given_ = packed_ = tensor;
    if (tensor.rank != 4) return;
    int64_t const batch = tensor.sizes[0], rows = tensor.sizes[2];
    strides_ = {rows == 1 ? tensor.strides[0] : tensor.strides[2], tensor.strides[1], tensor.strides[3]};
    sizes_ = {batch * rows, tensor.sizes[1], tensor.sizes[3]};
    needs_copy_ = batch > 1 && rows > 1 && tensor.strides[0] != rows * tensor.strides[2];
    if (needs_copy_) strides_ = contiguous_strides(sizes_);
    packed_.sizes = sizes_.data();
    packed_.strides = strides_.data();
    packed_.rank = 3;
  }

  bool needs_copy() const { return needs_copy_; }
  // Not to be read where a copy is needed, and has not been made.
  TensorInfo const& info() const { return packed_; }

  void copy() {
    int64_t const* const sizes = given_.sizes;
    copy_ = empty_strided<4>({sizes[0], sizes[1], sizes[2], sizes[3]},
                             {sizes[2] * strides_[0], strides_[1], strides_[0], strides_[2]}, given_.dtype, given_);
    copy_into(copy_.get(), given_.handle);
    packed_.handle = copy_.get();
  }

 private:
  TensorInfo given_{}, packed_{};
  std::array<int64_t, 3> sizes_{}, strides_{};
  bool needs_copy_ = false;
  Tensor copy_;  // (B, H, N, D), the rows one after the other; null: none was needed
};

class RowsVarlenStack {
 public:
  explicit RowsVarlenStack(StackReader& stack) : tensors_(stack), lengths_(stack), score_(stack) {
    tensors_.separate(/*rows_first=*/false);
    q_.set(tensor_info("q", tensors_.q.get()));
    k_.set(tensor_info("k", tensors_.k.get()));
    v_.set(tensor_info("v", tensors_.v.get()));
  }

  VarlenFwdArgs args() {
    VarlenArgs const lengths = lengths_.args();
    auto const packed = [&] {
      return VarlenFwdArgs{.call = pack(score_.args(q_.info(), k_.info(), v_.info()), lengths, views_),
                           .lengths = lengths};
    };
    if (!(q_.needs_copy() || k_.needs_copy() || v_.needs_copy())) return packed();
    VarlenFwdArgs const uncopied = packed();
    check_varlen_fwd(uncopied, is_cuda(uncopied.call.q));  // a refusal launches nothing
    for (PackedRows* rows : {&q_, &k_, &v_}) {
      if (rows->needs_copy()) rows->copy();
    }
    return packed();
  }

  // out, (B * N, Hq, Dv), as (B, N, Hq, Dv) where q had 4 dims.
  Tensor unpack(Tensor out) const {
    TensorInfo const q = tensor_info("q", tensors_.q.get()), rows = tensor_info("out", out.get());
    if (q.rank != 4) return out;
    Part const batches{
        .rank = 4,
        .sizes = {q.sizes[0], q.sizes[2], rows.sizes[1], rows.sizes[2]},
        .strides = {q.sizes[2] * rows.strides[0], rows.strides[0], rows.strides[1], rows.strides[2]}};
    return batches.of(rows);
  }

 private:
  LayerTensors tensors_;
  LengthsStack lengths_;
  LayerScore score_;
  PackedRows q_, k_, v_;
  std::array<PackedView, 3> views_;
};

void boxed_rows_varlen_fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  RowsVarlenStack owned(reader);
  FwdResult result = varlen_fwd_cuda(owned.args());
  stack[0] = stable::from(owned.unpack(std::move(result.out)).release());
  stack[1] = stable::from(result.lse.release());
}

}  // namespace
}  // namespace flash_cute

STABLE_TORCH_LIBRARY_FRAGMENT(flash_cute, m) {
  m.def("_rows_varlen_fwd(" FLASH_CUTE_LAYER_TENSORS ", " FLASH_CUTE_LENGTHS ", " FLASH_CUTE_LAYER_SCORE
        ") -> (Tensor out, Tensor lse)");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, m) { m.impl("_rows_varlen_fwd", &flash_cute::boxed_rows_varlen_fwd); }
