// The checks of caches, in the order of a reader: their tensors, their tables, then what is asked of them.
#pragma once

#include "checks.h"
#include "checks_lengths.h"
#include "kvcache.h"

namespace flash_cute {

inline bool is_heads_first(std::string_view kv_layout) {
  FLASH_CUTE_CHECK(kv_layout == "NHD" || kv_layout == "HND", "kv_layout: expected 'NHD' or 'HND', got '", kv_layout,
                   "'");
  return kv_layout == "HND";
}

inline bool is_any_float8(TensorInfo const& tensor) {
  return tensor.dtype == aoti_torch_dtype_float8_e4m3fn() || is_e5m2(tensor);
}

inline CacheType cache_type(TensorInfo const& cache) {
  if (!is_any_float8(cache)) return CacheType::k16Bit;
  return is_e5m2(cache) ? CacheType::kE5M2 : CacheType::kE4M3;
}

inline void check_cache_rank(TensorInfo const& cache, CacheArgs const& args) {
  bool const heads_first = is_heads_first(args.kv_layout);
  std::string_view const dims = args.page_table ? heads_first ? "(pages, heads, page, head_dim)"
                                                              : "(pages, page, heads, head_dim)"
                                : heads_first   ? "(batch, heads, keys, head_dim)"
                                                : "(batch, keys, heads, head_dim)";
  FLASH_CUTE_CHECK(cache.rank == 4, cache.name, ": expected 4 dims ", dims, ", got ", cache.rank, ": ",
                   shape_text(cache));
  check_sizes(cache);
  FLASH_CUTE_CHECK(cache.sizes[3] > 0, cache.name, ": expected a head dim of at least 1, got ", shape_text(cache));
}

// Caches are read and written in place, since a copy of one would take longer than the call: what the kernels' 16-byte
// accesses cannot reach is refused.
inline void check_in_place(TensorInfo const& tensor, int bytes, bool on_cuda) {
  FLASH_CUTE_CHECK(tensor.sizes[3] == 1 || tensor.strides[3] == 1, tensor.name,
                   ": expected a contiguous last dim, got a stride of ", tensor.strides[3]);
  if (!on_cuda) return;
  int const vector = 16 / bytes;
  FLASH_CUTE_CHECK(tensor.sizes[3] % vector == 0, tensor.name, ": expected a head dim that is a multiple of ", vector,
                   " on CUDA, where it is not copied, got ", tensor.sizes[3]);
  for (int dim = 0; dim < 3; ++dim) {
    FLASH_CUTE_CHECK(tensor.sizes[dim] <= 1 || tensor.strides[dim] % vector == 0, tensor.name,
                     ": expected strides that are multiples of 16 bytes on CUDA, where it is not copied, got one of ",
                     tensor.strides[dim], " elements");
  }
  uintptr_t const address = reinterpret_cast<uintptr_t>(data_pointer(tensor.handle));  // 0 of a meta tensor
  FLASH_CUTE_CHECK(address % 16 == 0, tensor.name,
                   ": expected an address that is a multiple of 16 on CUDA, where it is not copied, got ", address);
}

// The two caches as one another's. `q` has their device.
inline void check_caches(TensorInfo const& q, TensorInfo const& k, TensorInfo const& v, CacheArgs const& args,
                         bool on_cuda) {
  for (TensorInfo const* cache : {&k, &v}) {
    check_same_device(q, *cache);
    check_cache_rank(*cache, args);
  }
  char const* const entries = args.page_table ? "pages" : "sequences";
  FLASH_CUTE_CHECK(v.sizes[0] == k.sizes[0], "v_cache: expected as many ", entries, " as k_cache, ", k.sizes[0],
                   ", got ", v.sizes[0]);
  FLASH_CUTE_CHECK(v.sizes[1] == k.sizes[1], "v_cache: expected as many heads as k_cache, ", k.sizes[1], ", got ",
                   v.sizes[1]);
  FLASH_CUTE_CHECK(v.sizes[2] == k.sizes[2], "v_cache: expected ",
                   args.page_table ? "pages of k_cache's " : "k_cache's ",
                   k.sizes[2], " keys, got ", v.sizes[2]);
  if (is_any_float8(k)) {
    check_float8(v);
  } else {
    check_same_dtype(k, v);
  }
  int const bytes = is_any_float8(k) ? 1 : 2;
  for (TensorInfo const* cache : {&k, &v}) check_in_place(*cache, bytes, on_cuda);
}

inline void check_page_table(TensorInfo const& q, TensorInfo const& table, int64_t sequences, int64_t page) {
  check_lengths_tensor(q, table);
  FLASH_CUTE_CHECK(table.rank == 2 && table.sizes[0] == sequences, "page_table: expected the shape (", sequences,
                   ", max_pages), a row per sequence, got ", shape_text(table));
  FLASH_CUTE_CHECK(table.sizes[1] <= 1 || table.strides[1] == 1,
                   "page_table: expected contiguous columns, got a stride of ", table.strides[1]);
  FLASH_CUTE_CHECK(page >= 1, "k_cache: expected pages of at least 1 key, got ", page);
  FLASH_CUTE_CHECK(table.sizes[1] <= kMaxLength / page,
                   "page_table: expected pages of at most 10^9 keys per sequence, got ", table.sizes[1], " of ", page);
}

inline void check_cache_descale(TensorInfo const& q, TensorInfo const& cache, std::optional<TensorInfo> const& descale,
                                int64_t sequences) {
  if (!descale) return;
  FLASH_CUTE_CHECK(is_any_float8(cache), descale->name, ": expected None for a ", cache.name, " of ",
                   dtype_name(cache.dtype), ", which is not float8, got a tensor");
  check_descale(q, descale, {sequences, cache.sizes[1], 0, DescaleShapes::kNone});
}

// Whether V's rows are the first columns of K's. Of meta tensors, which have no address, the strides say it.
inline bool is_view_of_columns(TensorInfo const& k, TensorInfo const& v) {
  bool same = v.dtype == k.dtype && v.sizes[3] <= k.sizes[3] && data_pointer(v.handle) == data_pointer(k.handle);
  for (int dim = 0; dim < 3; ++dim) same &= k.sizes[dim] <= 1 || v.strides[dim] == k.strides[dim];
  return same;
}

// After the checks of the caches themselves: what says where the keys of so many sequences are. `of`: the argument that
// says how many sequences there are.
inline CacheProblem check_cache(TensorInfo const& q, TensorInfo const& k, TensorInfo const& v, CacheArgs const& args,
                                int64_t sequences, char const* of) {
  if (args.page_table) {
    check_page_table(q, *args.page_table, sequences, k.sizes[2]);
  } else {
    FLASH_CUTE_CHECK(k.sizes[0] == sequences, "k_cache: expected as many sequences as ", of, ", ", sequences, ", got ",
                     k.sizes[0]);
    FLASH_CUTE_CHECK(k.sizes[2] <= kMaxLength, "k_cache: expected at most 10^9 keys per sequence, got ", k.sizes[2]);
  }
  if (args.cache_seqlens) check_used(q, *args.cache_seqlens, sequences);
  check_cache_descale(q, k, args.descale_k, sequences);
  check_cache_descale(q, v, args.descale_v, sequences);
  int const max_pages = args.page_table ? static_cast<int>(args.page_table->sizes[1]) : 0;
  int const rows = static_cast<int>(k.sizes[2]);
  return {.sequences = static_cast<int>(sequences),
          .heads_kv = static_cast<int>(k.sizes[1]),
          .head_dim = static_cast<int>(k.sizes[3]),
          .head_dim_v = static_cast<int>(v.sizes[3]),
          .paged = args.page_table.has_value(),
          .pages = args.page_table ? static_cast<int>(k.sizes[0]) : 0,
          .page = args.page_table ? rows : 0,
          .max_pages = max_pages,
          .capacity = args.page_table ? max_pages * rows : rows,
          .k_type = cache_type(k),
          .v_type = cache_type(v),
          .values_in_keys = is_view_of_columns(k, v)};
}

// `tensor`: q, or keys to append. `offsets`: its cu_seqlens.
inline void check_rows_of_sequences(TensorInfo const& tensor, std::optional<TensorInfo> const& offsets) {
  bool const right = offsets ? tensor.packed : tensor.rows_first;
  FLASH_CUTE_CHECK(right, tensor.name, ": expected ",
                   offsets ? "3 dims (rows, heads, head_dim)" : "4 dims (batch, rows, heads, head_dim)", ", got ",
                   tensor.rank, ": ", shape_text(tensor));
  check_sizes(tensor);
  FLASH_CUTE_CHECK(tensor.sizes[2] <= kMaxLength, tensor.name, ": expected at most 10^9 rows, got ", tensor.sizes[2]);
  if (offsets) check_offsets(tensor, *offsets);
}

inline int64_t sequences_of(TensorInfo const& tensor, std::optional<TensorInfo> const& offsets) {
  return offsets ? offsets->sizes[0] - 1 : tensor.sizes[0];
}

inline void check_new_keys(KvCacheArgs const& args) {
  int64_t const least = args.cu_seqlens_q ? KvCacheProblem::kAsManyAsRows : 0;
  FLASH_CUTE_CHECK(args.new_keys >= least && args.new_keys <= kMaxLength, "new_keys: expected a number from ", least,
                   " to 10^9", args.cu_seqlens_q ? " (-1: as many as rows)" : "", ", got ", args.new_keys);
  FLASH_CUTE_CHECK(args.cache.cache_seqlens || args.new_keys == 0,
                   "cache_seqlens: expected the lengths to which keys are appended, got None");
}

inline void check_workspace(TensorInfo const& q, TensorInfo const& workspace) {
  check_same_device(q, workspace);
  FLASH_CUTE_CHECK(workspace.dtype == aoti_torch_dtype_uint8(), "workspace: expected uint8, got ",
                   dtype_name(workspace.dtype));
  FLASH_CUTE_CHECK(workspace.rank == 1, "workspace: expected the shape (bytes,), got ", shape_text(workspace));
  check_contiguous(workspace);
}

}  // namespace flash_cute
