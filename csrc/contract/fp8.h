// What a forward whose q, k and v are float8 has besides FwdParams. Plain data, valid on host and device.
#pragma once

#include <cstdint>

namespace flash_cute {

enum class OutType { kFloat16, kBFloat16, kFloat32, kE4M3, kE5M2 };

// Factors by which float8 values are multiplied to get what they stand for, in float32 on the device. Strides are in
// elements; 0: the same factor for all.
struct Descale {
  float const* data;  // null: 1
  int64_t batch_stride;
  int64_t head_stride;
  int64_t block_stride;    // of q and k: of blocks of 128 rows of a sequence; of v: of its columns
  int blocks;              // entries of that dim, at least 1, and 1 if it does not matter. Of v its own head dim, which
                           // may be below FwdParams::head_dim_v
  int heads_per_entry;     // of q: the query heads that share an entry; of k and v 1, by KV head
};

struct Fp8Terms {
  static constexpr int kBlock = 128;  // rows of a block

  bool q_is_e5m2;  // else e4m3fn; each tensor has its own
  bool k_is_e5m2;
  bool v_is_e5m2;
  OutType out_type;
  bool exact_lse;  // else the LSE is of the rounded numerators, and the kernel faster
  Descale q;
  Descale k;
  Descale v;
  Descale out;  // float8 results are divided by it; by query head; `block_stride` is 0

  constexpr bool all_e4m3() const { return !q_is_e5m2 && !k_is_e5m2 && !v_is_e5m2; }
};

}  // namespace flash_cute
