// Caches of keys and values as their kernels see them. Plain data.
#pragma once

#include "divisor.h"
#include "fp8.h"
#include "params.h"

namespace flash_cute {

// In elements. A page of a contiguous cache is a sequence's part of it.
struct CacheStrides {
  int64_t page;
  int64_t head;
  int64_t row;
};

// Key n of sequence b is row n % page_size of page entries[b * stride + n / page_size].
struct PageTable {
  int const* entries;  // null: sequence b has page b
  int64_t stride;
  int pages;  // a number outside of [0, pages) is of no page: what is read there is 0, what is written is dropped
  Divisor page_size;
  int capacity;  // keys of a sequence, at most
};

}  // namespace flash_cute
