// The append of keys and values to a cache: what the host gives the kernel.
#pragma once

#include "contract/kvcache.h"

namespace flash_cute {

enum class CacheElement { k16Bit, kE4M3, kE5M2 };

// K or V.
struct AppendTensor {
  void const* from;  // (batch, heads, rows, head_dim), 16-bit elements, or packed (heads, rows, head_dim)
  Strides from_strides;
  void* to;  // (pages, heads, page_size, head_dim)
  CacheStrides to_strides;
  int head_dim;  // a multiple of 8
  CacheElement type;
  Descale descale;  // of float8: what the stored values are multiplied by
};

struct AppendParams {
  AppendTensor k;
  AppendTensor v;
  PageTable table;
  int const* cache_seqlens;  // (batch): keys before; below 0: nothing is appended
  int const* cu_seqlens;     // (batch + 1): packed; null: each sequence has `rows`
  int batch;
  int heads;
  int rows;  // of a sequence, packed of all
  bool is_bfloat16;
};

}  // namespace flash_cute
