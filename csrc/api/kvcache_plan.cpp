#include "kvcache_plan.h"

#include <climits>

namespace flash_cute {
namespace {

bool holds(DecodeInstance const& instance, Problem const& call) {
  return instance.head_dims.head_dim >= call.head_dim && instance.head_dims.head_dim_v >= call.head_dim_v;
}

bool may_run(Backend backend, Problem const& call, Gpu gpu) {
  return (call.asked.backend == Backend::kAuto || call.asked.backend == backend) && runs_on(backend, gpu);
}

// The smallest kernel that serves the call, of Hopper's before those of others.
DecodeInstance const* find_instance(KvCacheProblem const& problem, Gpu gpu) {
  Problem const& call = problem.call;
  for (Backend backend : {Backend::kSm90, Backend::kSm80}) {
    if (!may_run(backend, call, gpu)) continue;
    DecodeInstance const* best = nullptr;
    for (DecodeInstance const& instance : decode_instances()) {
      bool const serves = instance.family->backend == backend &&
                          instance.family->row_invariant == call.row_invariant && holds(instance, call) &&
                          instance.family->serves(instance.head_dims, problem);
      if (serves && (best == nullptr || size_of(instance) < size_of(*best))) best = &instance;
    }
    if (best != nullptr) return best;
  }
  return nullptr;
}

[[noreturn]] void refuse(KvCacheArgs const& args, KvCacheProblem const& problem, Gpu gpu) {
  Problem const& call = problem.call;
  CacheProblem const& cache = problem.cache;
  std::string const on = " on compute capability " + std::to_string(gpu.capability / 10) + "." +
                         std::to_string(gpu.capability % 10);
  std::string const with_backend =
      call.asked.backend == Backend::kAuto ? "" : " with backend '" + std::string(args.call.backend) + "'";
  FLASH_CUTE_CHECK(!decode_instances().empty(),
                   "this build has no CUDA kernels for caches: expected CPU tensors, or a build without "
                   "FLASH_CUTE_NO_CUDA");
  FLASH_CUTE_CHECK(runs_on(call.asked.backend == Backend::kSm90 ? Backend::kSm90 : Backend::kSm80, gpu),
                   "backend: expected one that runs", on, ", got '", args.call.backend, "'");
  FLASH_CUTE_CHECK(std::any_of(decode_instances().begin(), decode_instances().end(),
                               [&](DecodeInstance const& instance) {
                                 return may_run(instance.family->backend, call, gpu) && holds(instance, call);
                               }),
                   "q: this build has no kernel for caches of head dims ", call.head_dim, " and ", call.head_dim_v,
                   with_backend);
  if (cache.k_type != CacheType::k16Bit) {
    FLASH_CUTE_CHECK(gpu.capability == 90 && call.asked.backend != Backend::kSm80, "k_cache: expected q's dtype", on,
                     call.asked.backend == Backend::kSm80 ? " with backend 'sm80'" : "", ", got ",
                     dtype_name(args.call.k.dtype));
    fail("q: this build has no kernel for caches of float8 of head dims ", call.head_dim, " and ", call.head_dim_v);
  }
  fail("q: this build has no kernel for caches of head dims ", call.head_dim, " and ", call.head_dim_v, with_backend,
       " and a v_cache that is not the first columns of k_cache");
}

}  // namespace

int64_t row_tiles(Problem const& call, DecodePlan const& plan) {
  int64_t const rows = int64_t{call.len_q} * (call.heads_q / std::max(1, call.heads_kv));
  int const tile = rows_of_tile(static_cast<int>(std::min<int64_t>(rows, kMaxLength)), plan.many_rows);
  return call.packed ? call.batch + rows / plan.many_rows : int64_t{call.batch} * ((rows + tile - 1) / tile);
}

DecodeDecision plan_decode(KvCacheArgs const& args, KvCacheProblem const& problem, Gpu gpu) {
  if (int const asked = problem.call.asked.num_sms; asked > 0) {
    FLASH_CUTE_CHECK(asked <= gpu.num_sms, "backend: expected at most ", gpu.num_sms, " multiprocessors, got '",
                     args.call.backend, "'");
    gpu.num_sms = asked;
  }
  check_row_invariant(problem.call, gpu);
  FLASH_CUTE_CHECK(!problem.call.row_invariant || problem.cache.k_type == CacheType::k16Bit,
                   "row_invariant: expected caches of q's dtype, or False; got True");
  DecodeInstance const* const instance = find_instance(problem, gpu);
  if (instance == nullptr) refuse(args, problem, gpu);
  DecodeDecision decision{.instance = instance, .gpu = gpu};
  decision.plan.dtype = problem.call.bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  decision.plan.head_dim = instance->head_dims.head_dim;
  decision.plan.head_dim_v = instance->head_dims.head_dim_v;
  decision.plan.float8_cache = problem.cache.k_type != CacheType::k16Bit;
  instance->family->plan(decision.plan, problem, gpu);
  // Kernels count the tiles of a KV head in 32 bits.
  int64_t const tiles = row_tiles(problem.call, decision.plan);
  int64_t const key_tiles = problem.cache.capacity / decision.plan.shape.block_n + 1;
  FLASH_CUTE_CHECK(tiles <= (1 << 30) / key_tiles, "q: expected at most 2^30 tiles of rows and keys of a KV head, got ",
                   tiles, " tiles of rows beside ", key_tiles, " of keys");
  return decision;
}

}  // namespace flash_cute
