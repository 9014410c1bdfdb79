// Caches: check, then launch or plan.
#include "kvcache.h"

#include "checks_kvcache.h"
#include "plan_json.h"

namespace flash_cute {
namespace {

[[noreturn]] void refuse_cuda(char const* function) {
  fail(function, ": expected CPU tensors: this build has no kernels for caches");
}

void check_types(KvCacheArgs const& args, bool on_cuda) {
  FwdArgs const& call = args.call;
  check_floating(call.q, on_cuda);
  FLASH_CUTE_CHECK(call.k.dtype == call.q.dtype || is_any_float8(call.k), "k_cache: expected q's dtype ",
                   dtype_name(call.q.dtype), ", float8_e4m3fn or float8_e5m2, got ", dtype_name(call.k.dtype));
}

// What is asked for beside the tensors, as check_fwd has it.
Problem check_call(KvCacheArgs const& args, CacheProblem const& cache, bool on_cuda) {
  FwdArgs const& call = args.call;
  if (call.sinks) check_sinks(call.q, *call.sinks, /*has_float8=*/false);
  if (call.alibi_slopes) check_alibi_slopes(call.q, *call.alibi_slopes, cache.sequences);
  Causal const causal = parse_causal(call.causal);
  Problem problem{.batch = cache.sequences,
                  .heads_q = static_cast<int>(call.q.sizes[1]),
                  .heads_kv = cache.heads_kv,
                  .len_q = static_cast<int>(call.q.sizes[2]),
                  .len_k = cache.capacity,
                  .head_dim = cache.head_dim,
                  .head_dim_v = cache.head_dim_v,
                  .packed = args.cu_seqlens_q.has_value(),
                  .bfloat16 = call.q.dtype == aoti_torch_dtype_bfloat16(),
                  .fp8 = false,  // of q
                  .all_e4m3 = false,
                  .scale = check_scale(call.q, call.scale),
                  .softcap = check_softcap(call.q, call.softcap),
                  .has_sinks = call.sinks.has_value(),
                  .has_alibi = call.alibi_slopes.has_value(),
                  .alibi_per_batch = call.alibi_slopes && call.alibi_slopes->rank == 2,
                  .causal = causal,
                  .band = make_band(call, causal, cache.capacity)};
  parse_backend(call.backend, problem);
  FLASH_CUTE_CHECK(problem.accumulate == Accumulate::kFloat32, "accumulate: expected 'float32' over a cache, got '",
                   kAccumulateNames[static_cast<int>(problem.accumulate)], "'");
  if (on_cuda) {
    check_cuda_rules(call, problem);
  } else {
    check_cpu_backend(call, problem);
  }
  return problem;
}

// Rows, or the rows of new keys, of so many columns and heads.
void check_new_rows(TensorInfo const& k, TensorInfo const& tensor, TensorInfo const& cache) {
  FLASH_CUTE_CHECK(tensor.sizes[1] == cache.sizes[1], tensor.name, ": expected as many heads as ", cache.name, ", ",
                   cache.sizes[1], ", got ", tensor.sizes[1]);
  FLASH_CUTE_CHECK(tensor.sizes[3] == cache.sizes[3], tensor.name, ": expected ", cache.name, "'s head dim ",
                   cache.sizes[3], ", got ", tensor.sizes[3]);
  FLASH_CUTE_CHECK(tensor.sizes[0] == k.sizes[0], "v: expected k's batch size ", k.sizes[0], ", got ", tensor.sizes[0]);
  FLASH_CUTE_CHECK(tensor.sizes[2] == k.sizes[2], "v: expected k's length ", k.sizes[2], ", got ", tensor.sizes[2]);
}

}  // namespace

KvCacheProblem check_kvcache(KvCacheArgs const& args, bool on_cuda) {
  FwdArgs const& call = args.call;
  check_rows_of_sequences(call.q, args.cu_seqlens_q);
  check_caches(call.q, call.k, call.v, args.cache, on_cuda);
  check_types(args, on_cuda);
  FLASH_CUTE_CHECK(call.k.sizes[3] == call.q.sizes[3], "k_cache: expected q's head dim ", call.q.sizes[3], ", got ",
                   call.k.sizes[3]);
  check_heads(call.q, call.k);
  check_new_keys(args);
  int64_t const sequences = sequences_of(call.q, args.cu_seqlens_q);
  CacheProblem const cache = check_cache(call.q, call.k, call.v, args.cache, sequences,
                                         args.cu_seqlens_q ? "cu_seqlens_q has" : "q has");
  if (args.workspace) check_workspace(call.q, *args.workspace);
  return {.call = check_call(args, cache, on_cuda),
          .cache = cache,
          .has_lengths = args.cache.cache_seqlens.has_value(),
          .new_keys = static_cast<int>(args.new_keys)};
}

// `out` is written in place, as the caches are read.
void check_kvcache_result(KvCacheArgs const& args, KvCacheResult const& result, bool on_cuda) {
  TensorInfo const& q = args.call.q;
  check_same_device(q, result.out);
  check_same_dtype(q, result.out);
  int64_t const sizes[] = {q.sizes[0], q.sizes[1], q.sizes[2], args.call.v.sizes[3]};
  TensorInfo const expected{.name = "out", .handle = nullptr, .sizes = sizes, .rank = 4, .packed = q.packed,
                            .rows_first = q.rows_first};
  bool const same = result.out.packed == q.packed && result.out.rows_first == q.rows_first && result.out.rank == 4 &&
                    std::equal(sizes, sizes + 4, result.out.sizes);
  FLASH_CUTE_CHECK(same, "out: expected the shape ", shape_text(expected), ", got ", shape_text(result.out));
  for (int dim = 0; dim < 3; ++dim) {
    FLASH_CUTE_CHECK(sizes[dim] <= 1 || result.out.strides[dim] != 0,
                     "out: expected elements that do not overlap, got a stride of 0");
  }
  check_in_place(result.out, /*bytes=*/2, on_cuda);
  check_lse(q, result.lse);
  int64_t stride = 1;
  for (int dim = 2; dim >= 0; --dim) {
    FLASH_CUTE_CHECK(result.lse.sizes[dim] <= 1 || result.lse.strides[dim] == stride,
                     "lse: expected a contiguous tensor, got a stride of ", result.lse.strides[dim]);
    stride *= std::max<int64_t>(1, result.lse.sizes[dim]);
  }
}

KvAppendProblem check_kvcache_append(KvAppendArgs const& args, bool on_cuda) {
  for (TensorInfo const* tensor : {&args.k, &args.v}) {
    check_same_device(args.k_cache, *tensor);
    check_rows_of_sequences(*tensor, args.cu_seqlens);
  }
  check_caches(args.k_cache, args.k_cache, args.v_cache, args.cache, on_cuda);
  if (is_any_float8(args.k_cache)) {
    check_floating(args.k, on_cuda);
  } else {
    check_floating(args.k_cache, on_cuda);
    check_same_dtype(args.k_cache, args.k);
  }
  check_same_dtype(args.k, args.v);
  check_new_rows(args.k, args.k, args.k_cache);
  check_new_rows(args.k, args.v, args.v_cache);
  FLASH_CUTE_CHECK(args.cache.cache_seqlens, "cache_seqlens: expected the lengths to which keys are appended, got None");
  int64_t const sequences = sequences_of(args.k, args.cu_seqlens);
  CacheProblem const cache = check_cache(args.k_cache, args.k_cache, args.v_cache, args.cache, sequences,
                                         args.cu_seqlens ? "cu_seqlens has" : "k has");
  return {.cache = cache, .packed = args.cu_seqlens.has_value(), .new_keys = static_cast<int>(args.k.sizes[2])};
}

FwdResult kvcache_fwd_cuda(KvCacheArgs const& args) {
  check_kvcache(args, /*on_cuda=*/true);
  refuse_cuda("attention_with_kvcache");
}

void kvcache_fwd_out_cuda(KvCacheArgs const& args, KvCacheResult const& result) {
  check_kvcache(args, /*on_cuda=*/true);
  check_kvcache_result(args, result, /*on_cuda=*/true);
  refuse_cuda("attention_with_kvcache");
}

void kvcache_append_cuda(KvAppendArgs const& args) {
  check_kvcache_append(args, /*on_cuda=*/true);
  refuse_cuda("append_kvcache");
}

std::string kvcache_plan_json(KvCacheArgs const& args, int64_t capability) {
  KvCacheProblem problem;
  PlannedCall const call = check_planned(args.call, capability, [&](bool on_cuda) {
    problem = check_kvcache(args, on_cuda);
    return problem.call;
  });
  if (call.gpu) refuse_cuda("attention_with_kvcache");
  JsonObject json = call_json("cpu", args.call, problem.call);
  json.boolean("packed", problem.call.packed)
      .raw("page", problem.cache.paged ? std::to_string(problem.cache.page) : "null")
      .boolean("cache_seqlens", problem.has_lengths)
      .number("new_keys", int64_t{problem.new_keys})
      .string("dtype_k", dtype_name(args.call.k.dtype))
      .string("dtype_v", dtype_name(args.call.v.dtype))
      .number("workspace_bytes", int64_t{0})
      .raw("copies", JsonObject().raw("q", "null").raw("k_cache", "null").raw("v_cache", "null").raw("out", "null").text())
      .raw("reasons", json_list(cpu_reasons(problem.call)));
  return json.text();
}

}  // namespace flash_cute
