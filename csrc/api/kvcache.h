// Caches of keys and values as the operators call them: checks, launches and plans.
//
// Sequence b has Nk_b keys. capacity is the cache's rows, or max_pages * page:
//
//   Nk_b = clamp(cache_seqlens[b] + new keys, 0, capacity), 0 where cache_seqlens[b] < 0; capacity if there are none
//
// Whatever the device holds there, nothing outside of the tensors is read or written, and the host never reads it. Key
// n is row n of the cache's entry b, or row n % page of the page page_table[b][n / page]. A number of no page stands
// for keys and values of zeros, and what would be appended there is dropped, as is what is past the capacity.
#pragma once

#include "fwd.h"
#include "packed_view.h"
#include "planning/kvcache.h"

namespace flash_cute {

// What the caches have besides their tensors.
struct CacheArgs {
  std::optional<TensorInfo> cache_seqlens;  // (sequences,) int32: keys before the append; none: the caches are full
  std::optional<TensorInfo> page_table;     // (sequences, max_pages) int32; none: the caches are contiguous
  std::string_view kv_layout;               // "NHD" or "HND"
  std::optional<TensorInfo> descale_k;      // one number or (sequences, heads_kv) float32: of float8 caches alone
  std::optional<TensorInfo> descale_v;
};

struct KvCacheArgs {
  // q is (batch, heads_q, rows, head_dim), or packed. k and v are the caches, (batch or pages, heads_kv, keys,
  // head_dim): what the user has in another order is seen so.
  FwdArgs call;
  CacheArgs cache;
  std::optional<TensorInfo> cu_seqlens_q;  // (sequences + 1,) int32: q is packed
  int64_t new_keys;                        // of each sequence; -1: as many as it has rows
  std::optional<TensorInfo> workspace;     // uint8; none: the call allocates its own
};

struct KvAppendArgs {
  TensorInfo k_cache;  // (batch or pages, heads_kv, keys, head_dim)
  TensorInfo v_cache;
  TensorInfo k;  // (batch, heads_kv, new keys, head_dim), or packed
  TensorInfo v;
  CacheArgs cache;
  std::optional<TensorInfo> cu_seqlens;  // (sequences + 1,) int32: k and v are packed
};

// The results of a call that is given them.
struct KvCacheResult {
  TensorInfo out;  // (batch, heads_q, rows, head_dim_v), or packed
  TensorInfo lse;  // (batch, heads_q, rows), or packed
};

// They check the lengths' tensors, never what these hold. `on_cuda`: whether the CUDA rules apply: for CUDA tensors,
// and for a plan for a given GPU.
KvCacheProblem check_kvcache(KvCacheArgs const& args, bool on_cuda);
void check_kvcache_result(KvCacheArgs const& args, KvCacheResult const& result, bool on_cuda);
KvAppendProblem check_kvcache_append(KvAppendArgs const& args, bool on_cuda);

// CUDA tensors, on the current stream of their device. Results that are allocated are contiguous in the user's order.
FwdResult kvcache_fwd_cuda(KvCacheArgs const& args);
void kvcache_fwd_out_cuda(KvCacheArgs const& args, KvCacheResult const& result);
void kvcache_append_cuda(KvAppendArgs const& args);

// The plan as JSON. `capability` 0: that of the tensors' own device.
std::string kvcache_plan_json(KvCacheArgs const& args, int64_t capability);

}  // namespace flash_cute
