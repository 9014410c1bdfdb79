// Attention over a cache on CUDA, and the append: check, plan, allocate, launch. No state outlives a call.
#include "kvcache.h"

#ifdef FLASH_CUTE_NO_CUDA

namespace flash_cute {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error("flash_cute: this build has no CUDA kernels (it was built with FLASH_CUTE_NO_CUDA)");
}

}  // namespace

FwdResult kvcache_fwd_cuda(KvCacheArgs const&) { refuse(); }
void kvcache_fwd_out_cuda(KvCacheArgs const&, KvCacheResult const&) { refuse(); }
void kvcache_append_cuda(KvAppendArgs const&) { refuse(); }

}  // namespace flash_cute

#else

#include "instances.h"  // generated: the kernels of this build
#include "kernel_args.h"
#include "kvcache/append.h"
#include "kvcache_plan.h"

namespace flash_cute {
namespace {

int const* int_data(std::optional<TensorInfo> const& tensor) {
  return tensor ? static_cast<int const*>(data_pointer(tensor->handle)) : nullptr;
}

// Where the kernels find the rows of a cache; a contiguous one has a page for each sequence.
CacheStrides cache_strides(TensorInfo const& cache) {
  Strides const strides = kernel_strides(cache.sizes, cache.strides);
  return {.page = strides.batch, .head = strides.head, .row = strides.row};
}

PageTable make_page_table(CacheArgs const& args, CacheProblem const& cache, TensorInfo const& k) {
  PageTable table{.entries = nullptr,
                  .stride = 0,
                  .pages = static_cast<int>(k.sizes[0]),
                  .page_size = static_cast<int>(k.sizes[2]),
                  .capacity = cache.capacity};
  if (!args.page_table) return table;
  table.entries = int_data(args.page_table);
  table.stride = args.page_table->sizes[0] > 1 ? args.page_table->strides[0] : 0;
  return table;
}

// The memory that parts of results go to: the caller's, or the call's own.
class Parts {
 public:
  Parts(KvCacheArgs const& args, int64_t bytes) : own_(args.workspace ? 0 : bytes, args.call.q) {
    if (!args.workspace) {
      data = own_.part<float>(bytes == 0 ? kNoPart : 0);
      return;
    }
    TensorInfo const& given = *args.workspace;
    void* const begin = mutable_data_pointer(given.handle);
    FLASH_CUTE_CHECK(given.sizes[0] >= bytes, "workspace: expected at least ", bytes, " bytes, got ", given.sizes[0]);
    FLASH_CUTE_CHECK(reinterpret_cast<uintptr_t>(begin) % 16 == 0,
                     "workspace: expected an address that is a multiple of 16, got ", begin);
    data = static_cast<float*>(begin);
  }

  float* data;

 private:
  Workspace own_;
};

struct Results {
  void* out;
  Strides out_strides;
  float* lse;
};

void launch_decode(KvCacheArgs const& args, KvCacheProblem const& problem, DecodeDecision const& decision,
                   Results const& results) {
  FwdArgs const& call = args.call;
  Problem const& plain = problem.call;
  if (plain.heads_q == 0 || plain.len_q == 0) return;
  DecodePlan const& plan = decision.plan;
  Operand const q(call.q, read_copy(call.q, /*vector=*/8), plain.padded_head_dim());
  Parts const parts(args, plan.workspace_bytes);
  auto const limit = [](std::optional<int64_t> side) {
    return static_cast<int>(std::min<int64_t>(side.value_or(kNoLimit), kNoLimit));
  };
  DecodeParams const params{.q = q.data,
                            .k = data_pointer(call.k.handle),
                            .v = data_pointer(call.v.handle),
                            .out = results.out,
                            .lse = results.lse,
                            .parts = parts.data,
                            .q_strides = q.strides,
                            .out_strides = results.out_strides,
                            .k_strides = cache_strides(call.k),
                            .v_strides = cache_strides(call.v),
                            .table = make_page_table(args.cache, problem.cache, call.k),
                            .cache_seqlens = int_data(args.cache.cache_seqlens),
                            .cu_q = int_data(args.cu_seqlens_q),
                            .new_keys = problem.new_keys,
                            .batch = plain.batch,
                            .heads_q = plain.heads_q,
                            .heads_kv = plain.heads_kv,
                            .group = plain.heads_q / plain.heads_kv,
                            .len_q = plain.len_q,
                            .head_dim = plain.head_dim,
                            .head_dim_v = plain.head_dim_v,
                            .k_is_e5m2 = problem.cache.k_type == CacheType::kE5M2,
                            .v_is_e5m2 = problem.cache.v_type == CacheType::kE5M2,
                            .descale_k = make_descale(args.cache.descale_k, 1),
                            .descale_v = make_descale(args.cache.descale_v, 1),
                            .window_left = limit(call.window_left),
                            .window_right = plain.causal == Causal::kNone ? limit(call.window_right) : 0,
                            .bottom_right = plain.causal != Causal::kTopLeft,
                            .scale_log2 = make_scale_log2(plain),
                            .sinks = make_sinks(call),
                            .score = make_score_terms(call, plain),
                            .long_rows = plan.long_rows,
                            .bundles = plan.bundles,
                            .most_pieces = plan.most_pieces,
                            .many_rows = plan.many_rows,
                            .part_rows = plan.part_rows,
                            .slot_rows = plan.slot_rows,
                            .cut_at_ranges = plan.cut_at_ranges};
  check_cuda(decision.instance->launch(plan, params, current_stream(call.q.device_index)),
             "launch the kernel of a cache");
}

DecodeDecision plan_on(KvCacheArgs const& args, KvCacheProblem const& problem) {
  TensorInfo const& q = args.call.q;
  FLASH_CUTE_CHECK(is_cuda(q), "q: expected a CUDA tensor, got ", device_name(q));
  return plan_decode(args, problem, device_gpu(q.device_index));
}

using AppendLaunch = cudaError_t (*)(AppendParams const&, cudaStream_t);
struct AppendInstance {
  int arch;
  AppendLaunch launch;
};
#define FLASH_CUTE_APPEND_INSTANCE(arch) {arch, &kvcache::launch_append<arch>},
constexpr AppendInstance kAppendInstances[] = {FLASH_CUTE_APPEND_INSTANCES(FLASH_CUTE_APPEND_INSTANCE){0, nullptr}};

// That of the newest architecture that runs on the GPU.
AppendLaunch find_append(Gpu gpu, TensorInfo const& k) {
  AppendInstance best{0, nullptr};
  for (AppendInstance const& instance : kAppendInstances) {
    bool const runs = instance.arch == 90 ? gpu.capability == 90 : gpu.capability >= instance.arch;
    if (instance.launch != nullptr && runs && instance.arch > best.arch) best = instance;
  }
  FLASH_CUTE_CHECK(best.launch != nullptr, k.name, ": this build has no CUDA kernels for compute capability ",
                   gpu.capability / 10, ".", gpu.capability % 10);
  return best.launch;
}

}  // namespace

FwdResult kvcache_fwd_cuda(KvCacheArgs const& args) {
  KvCacheProblem const problem = check_kvcache(args, /*on_cuda=*/true);
  DecodeDecision const decision = plan_on(args, problem);
  TensorInfo const& q = args.call.q;
  int64_t const batch = q.sizes[0], heads = q.sizes[1], rows = q.sizes[2], columns = problem.call.head_dim_v;
  CurrentDevice const device(q.device_index);
  bool const packed = problem.call.packed;
  std::array<int64_t, 4> const out_sizes{batch, rows, heads, columns};
  std::array<int64_t, 3> const packed_out_sizes{rows, heads, columns}, lse_sizes{batch, heads, rows};
  std::array<int64_t, 2> const packed_lse_sizes{heads, rows};
  int32_t const float32 = aoti_torch_dtype_float32();
  FwdResult result{
      .out = packed ? empty_strided(packed_out_sizes, contiguous_strides(packed_out_sizes), q.dtype, q)
                    : empty_strided(out_sizes, contiguous_strides(out_sizes), q.dtype, q),
      .lse = packed ? empty_strided(packed_lse_sizes, contiguous_strides(packed_lse_sizes), float32, q)
                    : empty_strided(lse_sizes, contiguous_strides(lse_sizes), float32, q)};
  Results const results{.out = mutable_data_pointer(result.out.get()),
                        .out_strides = {.batch = rows * heads * columns, .head = columns, .row = heads * columns},
                        .lse = static_cast<float*>(mutable_data_pointer(result.lse.get()))};
  launch_decode(args, problem, decision, results);
  return result;
}

void kvcache_fwd_out_cuda(KvCacheArgs const& args, KvCacheResult const& result) {
  KvCacheProblem const problem = check_kvcache(args, /*on_cuda=*/true);
  check_kvcache_result(args, result, /*on_cuda=*/true);
  DecodeDecision const decision = plan_on(args, problem);
  CurrentDevice const device(args.call.q.device_index);
  launch_decode(args, problem, decision,
                {.out = mutable_data_pointer(result.out.handle),
                 .out_strides = kernel_strides(result.out.sizes, result.out.strides),
                 .lse = static_cast<float*>(mutable_data_pointer(result.lse.handle))});
}

void kvcache_append_cuda(KvAppendArgs const& args) {
  KvAppendProblem const problem = check_kvcache_append(args, /*on_cuda=*/true);
  TensorInfo const& cache = args.k_cache;
  FLASH_CUTE_CHECK(is_cuda(cache), "k_cache: expected a CUDA tensor, got ", device_name(cache));
  AppendLaunch const launch = find_append(device_gpu(cache.device_index), cache);
  if (problem.cache.sequences == 0 || problem.cache.heads_kv == 0 || problem.new_keys == 0) return;
  CurrentDevice const device(cache.device_index);
  Operand const k(args.k, read_copy(args.k, /*vector=*/8), problem.cache.head_dim);
  Operand const v(args.v, read_copy(args.v, /*vector=*/8), problem.cache.head_dim_v);
  auto const tensor = [&](Operand const& from, TensorInfo const& to, int head_dim, CacheType type,
                          std::optional<TensorInfo> const& descale) {
    return AppendTensor{.from = from.data,
                        .from_strides = from.strides,
                        .to = mutable_data_pointer(to.handle),
                        .to_strides = cache_strides(to),
                        .head_dim = head_dim,
                        .type = type == CacheType::k16Bit ? CacheElement::k16Bit
                                : type == CacheType::kE4M3 ? CacheElement::kE4M3
                                                           : CacheElement::kE5M2,
                        .descale = make_descale(descale, 1)};
  };
  AppendParams const params{
      .k = tensor(k, args.k_cache, problem.cache.head_dim, problem.cache.k_type, args.cache.descale_k),
      .v = tensor(v, args.v_cache, problem.cache.head_dim_v, problem.cache.v_type, args.cache.descale_v),
      .table = make_page_table(args.cache, problem.cache, args.k_cache),
      .cache_seqlens = int_data(args.cache.cache_seqlens),
      .cu_seqlens = int_data(args.cu_seqlens),
      .batch = problem.cache.sequences,
      .heads = problem.cache.heads_kv,
      .rows = problem.new_keys,
      .is_bfloat16 = args.k.dtype == aoti_torch_dtype_bfloat16()};
  check_cuda(launch(params, current_stream(cache.device_index)), "launch the append");
}

}  // namespace flash_cute

#endif  // FLASH_CUTE_NO_CUDA
