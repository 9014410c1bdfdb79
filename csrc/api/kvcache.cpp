// Caches: check, then launch or plan.
#include "kvcache.h"

#include "checks_kvcache.h"
#include "kvcache_plan.h"
#include "plan_json.h"

namespace flash_cute {
namespace {

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
  std::string_view backend = call.backend;
  take_ending(backend, kBatchDependent);  // check_kvcache has it
  problem.row_invariant = take_ending(backend, kRowInvariant);
  int const num_sms = take_multiprocessors(backend);
  parse_backend(backend, problem);
  problem.asked.num_sms = num_sms;
  FLASH_CUTE_CHECK(num_sms == 0 || on_cuda, "backend: expected no number of multiprocessors on the CPU, got '",
                   call.backend, "'");
  FLASH_CUTE_CHECK(problem.accumulate == AccumulateIn::kFloat32, "accumulate: expected 'float32' over a cache, got '",
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

void add_kernel(JsonObject& json, Problem const& call, DecodeDecision const& decision) {
  DecodePlan const& plan = decision.plan;
  json.string("family", plan.family != nullptr ? plan.family : decision.instance->family->name)
      .string("kernel", plan.kernel)
      .number("kernel_head_dim", int64_t{plan.head_dim})
      .number("kernel_head_dim_v", int64_t{plan.head_dim_v})
      .number("entry", int64_t{0})
      .string("tile", "")
      .number("block_m", int64_t{plan.shape.block_m})
      .number("block_n", int64_t{plan.shape.block_n})
      .number("threads", int64_t{plan.shape.threads})
      .number("stages", int64_t{plan.shape.stages})
      .number("smem_bytes", int64_t{plan.shape.smem_bytes})
      .number("ctas_per_sm", int64_t{plan.shape.ctas_per_sm})
      .number("tiles", call.heads_kv * row_tiles(call, plan))
      .number("column_parts", int64_t{1})
      .string("variant", plan.float8_cache ? "float8 cache" : "cache")
      .string("accumulate", "float32")
      .number("split_tiles", int64_t{0})
      .number("split_ctas", plan.ctas)
      .number("capability", int64_t{decision.gpu.capability});
}

std::vector<std::string> reasons(KvCacheProblem const& problem, DecodeDecision const& decision,
                                 std::vector<NamedCopy> const& copies) {
  std::string const backend = backend_name(decision.backend());
  bool const asked = problem.call.asked.backend != Backend::kAuto;
  std::vector<std::string> sentences{"Backend " + backend + (asked ? " was asked for" : " serves this cache") +
                                     ", on compute capability " + capability_text(decision.gpu.capability) + "."};
  for (std::string const& note : decision.instance->family->notes(decision.plan, problem)) sentences.push_back(note);
  sentences.push_back("The lengths are read on the device, which finds the keys that there are.");
  for (NamedCopy const& named : copies) {
    if (named.copy == Copy::kNone) continue;
    sentences.push_back(std::string(named.name) + " is copied once: " + copy_reason(named, problem.call) + ".");
  }
  bool const is_empty = decision.plan.ctas == 0 && decision.plan.long_ctas == 0;
  if (is_empty) sentences.push_back("Nothing is computed: there is no row.");
  return sentences;
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
          .new_keys = static_cast<int>(args.new_keys),
          .batch_invariant = !args.call.backend.ends_with(kBatchDependent)};
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
  FLASH_CUTE_CHECK(args.cache.cache_seqlens,
                   "cache_seqlens: expected the lengths to which keys are appended, got None");
  int64_t const sequences = sequences_of(args.k, args.cu_seqlens);
  CacheProblem const cache = check_cache(args.k_cache, args.k_cache, args.v_cache, args.cache, sequences,
                                         args.cu_seqlens ? "cu_seqlens has" : "k has");
  return {.cache = cache, .packed = args.cu_seqlens.has_value(), .new_keys = static_cast<int>(args.k.sizes[2])};
}

std::string kvcache_plan_json(KvCacheArgs const& args, int64_t capability) {
  KvCacheProblem problem;
  PlannedCall const call = check_planned(args.call, capability, [&](bool on_cuda) {
    problem = check_kvcache(args, on_cuda);
    return problem.call;
  });
  std::optional<DecodeDecision> decision;
  if (call.gpu) decision = plan_decode(args, problem, *call.gpu);
  JsonObject json = call_json(decision ? backend_name(decision->backend()) : "cpu", args.call, problem.call);
  json.boolean("packed", problem.call.packed)
      .raw("page", problem.cache.paged ? std::to_string(problem.cache.page) : "null")
      .boolean("cache_seqlens", problem.has_lengths)
      .number("new_keys", int64_t{problem.new_keys})
      .string("dtype_k", dtype_name(args.call.k.dtype))
      .string("dtype_v", dtype_name(args.call.v.dtype))
      .number("workspace_bytes", decision ? decision->plan.workspace_bytes : 0);
  if (decision) add_kernel(json, problem.call, *decision);
  Copy const q = decision ? read_copy(args.call.q, /*vector=*/8) : Copy::kNone;
  std::vector<NamedCopy> const copies{{"q", q, Access::kRead, problem.call.padded_head_dim()},
                                      {"k_cache", Copy::kNone, Access::kRead, problem.call.head_dim},
                                      {"v_cache", Copy::kNone, Access::kRead, problem.call.head_dim_v},
                                      {"out", Copy::kNone, Access::kWritten, problem.call.head_dim_v}};
  json.raw("copies", copies_json(copies, problem.call))
      .raw("reasons", json_list(decision ? reasons(problem, *decision, copies) : cpu_reasons(problem.call)));
  return json.text();
}

}  // namespace flash_cute
