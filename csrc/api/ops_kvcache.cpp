// The operators of caches of keys and values, and their schemas.
//
//   kvcache_fwd           attention over the caches: q (B, Nq, Hq, D), or with `cu_seqlens_q` packed (Tq, Hq, D)
//   kvcache_fwd_out       the same into results that the caller has
//   kvcache_append        writes new keys and values behind those that the caches have
//   _kvcache_fwd, _kvcache_fwd_out, _kvcache_append   the same operators, below autograd
//   kvcache_plan, check_kvcache_fwd, check_kvcache_append   as fwd_plan and check_fwd, see ops.cpp; with `out` and
//                         `lse` check_kvcache_fwd raises what kvcache_fwd_out would raise
//
// `kv_layout` "NHD": the caches are (B, N, Hkv, D), or with `page_table` (pages, page, Hkv, D); "HND": (B, Hkv, N, D),
// (pages, Hkv, page, D). `new_keys`: how many keys each sequence has got from kvcache_append just before, -1: as many
// as it has rows. The lengths, of which the host reads only shapes and dtypes: kvcache.h. There is no derivative: what
// is attached to kvcache_fwd, kvcache_fwd_out and kvcache_append from Python refuses tensors that require grad. CPU
// kernels are registered from there, too.
#include "kvcache.h"
#include "stack.h"

namespace flash_cute {
namespace {

// A tensor of 4 dims seen as (batch, heads, rows, head_dim), or a packed one.
class SequencesView {
 public:
  TensorInfo info(TensorInfo const& tensor, bool packed) {
    return packed ? packed_.info(tensor, 3) : rows_.info(tensor);
  }

 private:
  PackedView packed_;
  RowsFirstView rows_;
};

// The caches, of whatever layout, seen as (batch or pages, heads, keys, head_dim).
class CacheViews {
 public:
  TensorInfo k(TensorInfo const& tensor, std::string_view kv_layout) { return of(k_, tensor, kv_layout); }
  TensorInfo v(TensorInfo const& tensor, std::string_view kv_layout) { return of(v_, tensor, kv_layout); }

 private:
  static TensorInfo of(RowsFirstView& view, TensorInfo const& tensor, std::string_view kv_layout) {
    return kv_layout == "NHD" ? view.info(tensor) : tensor;
  }

  RowsFirstView k_, v_;
};

class KvCacheStack {
 public:
  explicit KvCacheStack(StackReader& stack)
      : q_(stack.tensor()),
        k_cache_(stack.tensor()),
        v_cache_(stack.tensor()),
        cache_seqlens_(stack.optional_tensor()),
        page_table_(stack.optional_tensor()),
        cu_seqlens_q_(stack.optional_tensor()),
        new_keys_(stack.value<int64_t>()),
        kv_layout_(stack.string()),
        score_(stack),
        descale_k_(stack.optional_tensor()),
        descale_v_(stack.optional_tensor()),
        workspace_(stack.optional_tensor()),
        backend_(stack.string()) {}

  KvCacheArgs args() {
    FwdArgs call = score_.args(q_, k_cache_, v_cache_, backend_);
    std::string_view const kv_layout = view(kv_layout_);
    call.k.name = "k_cache";
    call.v.name = "v_cache";
    call.q = q_view_.info(call.q, is_packed());
    call.k = cache_views_.k(call.k, kv_layout);
    call.v = cache_views_.v(call.v, kv_layout);
    call.sequences = 0;  // the band is relative to a row's position, of however many sequences
    return {.call = call,
            .cache = {.cache_seqlens = optional_info("cache_seqlens", cache_seqlens_),
                      .page_table = optional_info("page_table", page_table_),
                      .kv_layout = kv_layout,
                      .descale_k = optional_info("descale_k", descale_k_),
                      .descale_v = optional_info("descale_v", descale_v_)},
            .cu_seqlens_q = optional_info("cu_seqlens_q", cu_seqlens_q_),
            .new_keys = new_keys_,
            .workspace = optional_info("workspace", workspace_)};
  }

  bool is_packed() const { return cu_seqlens_q_ != nullptr; }

 private:
  Tensor q_, k_cache_, v_cache_;
  Tensor cache_seqlens_, page_table_, cu_seqlens_q_;  // null: none was given
  int64_t new_keys_;
  String kv_layout_;
  ScoreStack score_;
  Tensor descale_k_, descale_v_, workspace_;  // null: none was given
  String backend_;
  SequencesView q_view_;
  CacheViews cache_views_;
};

class KvAppendStack {
 public:
  explicit KvAppendStack(StackReader& stack)
      : k_cache_(stack.tensor()),
        v_cache_(stack.tensor()),
        k_(stack.tensor()),
        v_(stack.tensor()),
        cache_seqlens_(stack.optional_tensor()),
        page_table_(stack.optional_tensor()),
        cu_seqlens_(stack.optional_tensor()),
        kv_layout_(stack.string()),
        descale_k_(stack.optional_tensor()),
        descale_v_(stack.optional_tensor()) {}

  KvAppendArgs args() {
    std::string_view const kv_layout = view(kv_layout_);
    bool const packed = cu_seqlens_ != nullptr;
    return {.k_cache = cache_views_.k(tensor_info("k_cache", k_cache_.get()), kv_layout),
            .v_cache = cache_views_.v(tensor_info("v_cache", v_cache_.get()), kv_layout),
            .k = k_view_.info(tensor_info("k", k_.get()), packed),
            .v = v_view_.info(tensor_info("v", v_.get()), packed),
            .cache = {.cache_seqlens = optional_info("cache_seqlens", cache_seqlens_),
                      .page_table = optional_info("page_table", page_table_),
                      .kv_layout = kv_layout,
                      .descale_k = optional_info("descale_k", descale_k_),
                      .descale_v = optional_info("descale_v", descale_v_)},
            .cu_seqlens = optional_info("cu_seqlens", cu_seqlens_)};
  }

 private:
  Tensor k_cache_, v_cache_, k_, v_;
  Tensor cache_seqlens_, page_table_, cu_seqlens_;  // null: none was given
  String kv_layout_;
  Tensor descale_k_, descale_v_;  // null: none was given
  CacheViews cache_views_;
  SequencesView k_view_, v_view_;
};

// The results of kvcache_fwd_out, or none.
class ResultStack {
 public:
  explicit ResultStack(StackReader& stack, bool optional)
      : out_(optional ? stack.optional_tensor() : stack.tensor()),
        lse_(optional ? stack.optional_tensor() : stack.tensor()) {}

  bool is_given() const { return out_ != nullptr; }

  KvCacheResult result(bool packed) {
    TensorInfo const lse = tensor_info("lse", lse_.get());
    return {.out = out_view_.info(tensor_info("out", out_.get()), packed),
            .lse = packed ? lse_view_.info(lse, 2) : lse};
  }

 private:
  Tensor out_, lse_;
  SequencesView out_view_;
  PackedView lse_view_;
};

void boxed_fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  KvCacheStack owned(reader);
  FwdResult result = kvcache_fwd_cuda(owned.args());
  stack[0] = stable::from(result.out.release());
  stack[1] = stable::from(result.lse.release());
}

void boxed_fwd_out(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  KvCacheStack owned(reader);
  ResultStack results(reader, /*optional=*/false);
  kvcache_fwd_out_cuda(owned.args(), results.result(owned.is_packed()));
}

void boxed_append(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  KvAppendStack owned(reader);
  kvcache_append_cuda(owned.args());
}

void boxed_plan(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  KvCacheStack owned(reader);
  stack[0] = stable::from(kvcache_plan_json(owned.args(), reader.value<int64_t>()));
}

void boxed_check_fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  KvCacheStack owned(reader);
  String const devices = reader.string();
  ResultStack results(reader, /*optional=*/true);
  KvCacheArgs args = owned.args();
  std::optional<KvCacheResult> result;
  if (results.is_given()) result = results.result(owned.is_packed());
  FwdArgs& call = args.call;
  CacheArgs& cache = args.cache;
  set_devices(view(devices),
              {&call.q, &call.k, &call.v, if_given(cache.cache_seqlens), if_given(cache.page_table),
               if_given(args.cu_seqlens_q), if_given(call.sinks), if_given(call.alibi_slopes),
               if_given(cache.descale_k), if_given(cache.descale_v), if_given(args.workspace),
               result ? &result->out : nullptr, result ? &result->lse : nullptr});
  bool const on_cuda = is_cuda(call.q);
  KvCacheProblem const problem = check_kvcache(args, on_cuda);
  if (result) check_kvcache_result(args, *result, on_cuda);
  stack[0] = stable::from(problem.call.scale);
}

void boxed_check_append(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  KvAppendStack owned(reader);
  String const devices = reader.string();
  KvAppendArgs args = owned.args();
  CacheArgs& cache = args.cache;
  set_devices(view(devices),
              {&args.k_cache, &args.v_cache, &args.k, &args.v, if_given(cache.cache_seqlens),
               if_given(cache.page_table), if_given(args.cu_seqlens), if_given(cache.descale_k),
               if_given(cache.descale_v)});
  check_kvcache_append(args, is_cuda(args.k_cache));
}

}  // namespace
}  // namespace flash_cute

// SymInt, so that torch.compile makes no graph per number of new keys.
#define FLASH_CUTE_KVCACHE                                                                                       \
  "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens, Tensor? page_table, Tensor? cu_seqlens_q, " \
  "SymInt new_keys, str kv_layout, " FLASH_CUTE_MASK ", " FLASH_CUTE_SCORE                                          \
  ", Tensor? descale_k, Tensor? descale_v, Tensor? workspace, str backend"
#define FLASH_CUTE_KVCACHE_APPEND                                                                     \
  "Tensor k, Tensor v, Tensor? cache_seqlens, Tensor? page_table, Tensor? cu_seqlens, str kv_layout, " \
  "Tensor? descale_k, Tensor? descale_v"

#define FLASH_CUTE_KVCACHE_RESULTS ", Tensor(a!) out, Tensor(b!) lse"
#define FLASH_CUTE_KVCACHE_WRITTEN "Tensor(a!) k_cache, Tensor(b!) v_cache, "

STABLE_TORCH_LIBRARY_FRAGMENT(flash_cute, m) {
  m.def("kvcache_fwd(" FLASH_CUTE_KVCACHE ") -> (Tensor out, Tensor lse)");
  m.def("_kvcache_fwd(" FLASH_CUTE_KVCACHE ") -> (Tensor out, Tensor lse)");
  m.def("kvcache_fwd_out(" FLASH_CUTE_KVCACHE FLASH_CUTE_KVCACHE_RESULTS ") -> ()");
  m.def("_kvcache_fwd_out(" FLASH_CUTE_KVCACHE FLASH_CUTE_KVCACHE_RESULTS ") -> ()");
  m.def("kvcache_append(" FLASH_CUTE_KVCACHE_WRITTEN FLASH_CUTE_KVCACHE_APPEND ") -> ()");
  m.def("_kvcache_append(" FLASH_CUTE_KVCACHE_WRITTEN FLASH_CUTE_KVCACHE_APPEND ") -> ()");
  m.def("kvcache_plan(" FLASH_CUTE_KVCACHE ", int capability) -> str");
  m.def("check_kvcache_fwd(" FLASH_CUTE_KVCACHE ", str devices=\"\", Tensor? out=None, Tensor? lse=None) -> float");
  m.def("check_kvcache_append(Tensor k_cache, Tensor v_cache, " FLASH_CUTE_KVCACHE_APPEND ", str devices=\"\") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, m) {
  m.impl("kvcache_fwd", &flash_cute::boxed_fwd);
  m.impl("_kvcache_fwd", &flash_cute::boxed_fwd);
  m.impl("kvcache_fwd_out", &flash_cute::boxed_fwd_out);
  m.impl("_kvcache_fwd_out", &flash_cute::boxed_fwd_out);
  m.impl("kvcache_append", &flash_cute::boxed_append);
  m.impl("_kvcache_append", &flash_cute::boxed_append);
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, m) {
  m.impl("kvcache_plan", &flash_cute::boxed_plan);
  m.impl("check_kvcache_fwd", &flash_cute::boxed_check_fwd);
  m.impl("check_kvcache_append", &flash_cute::boxed_check_append);
}
