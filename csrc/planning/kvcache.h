// A call over a cache that has passed the checks. Plain data: no torch.
#pragma once

#include "problem.h"

namespace flash_cute {

enum class CacheType { k16Bit, kE4M3, kE5M2 };  // k16Bit: q's type

// Where the keys of a cache are. Paged, key n of a sequence is key n % page of the page that its row of the table names
// at n / page; else a sequence has a row of the cache of its own.
struct CacheProblem {
  int sequences;
  int heads_kv;
  int head_dim;
  int head_dim_v;
  bool paged;
  int pages;      // paged: in the cache
  int page;       // paged: keys of a page, at least 1
  int max_pages;  // paged: of a sequence
  int capacity;   // keys that a sequence may have
  CacheType k_type;
  CacheType v_type;
  bool values_in_keys;  // V is a view of K's first columns
};

// The input of a plan. In `call` batch is the number of sequences, len_q the rows of each, or, if it is packed, of all;
// len_k is the capacity. The band is relative to a row's position, as that of packed sequences is.
struct KvCacheProblem {
  Problem call;
  CacheProblem cache;
  bool has_lengths;  // cache_seqlens is given; else each sequence has as many keys as its capacity
  int new_keys;      // appended to each sequence before; kAsManyAsRows: as many as it has rows
  bool batch_invariant = true;  // else the bits of a sequence may depend on the others, where that is faster

  static constexpr int kAsManyAsRows = -1;
};

// Keys that are appended to the caches.
struct KvAppendProblem {
  CacheProblem cache;
  bool packed;   // by cu_seqlens
  int new_keys;  // of each sequence, packed of all
};

}  // namespace flash_cute
