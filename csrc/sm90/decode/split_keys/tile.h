// Shared memory and threads that follow from the head dims: plain constants.
#pragma once

#include "contract/split_keys.h"

namespace flash_cute::sm90::decode::split_keys {

using flash_cute::split_keys::kConsumerWarps;
using flash_cute::split_keys::smem_bytes_of;
using flash_cute::split_keys::stage_bytes;
using flash_cute::split_keys::tile_keys;

// One warp for K and one for V copy at 0.8 of memory's rate, and two each at all of it. Where there are two CTAs their
// registers leave no room for more.
constexpr int warps_of_copied_tile(int ctas_per_sm) { return ctas_per_sm == 1 ? 2 : 1; }

constexpr int threads(int warps_of_tile) { return 32 * (kConsumerWarps + 2 * warps_of_tile); }

// With two, 168 registers are left to a thread: enough for 16-bit caches of head dim 64, and for float8 of 128, where Q
// is in shared memory. `bytes`: of an element of the cache.
constexpr int ctas_per_sm(int head_dim, int head_dim_v, int bytes) {
  return std::max(head_dim, head_dim_v) <= (bytes == 2 ? 64 : 128) ? 2 : 1;
}

// What a multiprocessor has, less what the driver keeps of each CTA, and of one of the merge kernel, which waits
// beside.
constexpr int smem_of_cta(int ctas) { return (233'472 - 1024) / ctas - 1024; }

// As many as there is room for.
constexpr int stages(int head_dim, int head_dim_v, int bytes) {
  int const left =
      smem_of_cta(ctas_per_sm(head_dim, head_dim_v, bytes)) - smem_bytes_of(0, head_dim, head_dim_v, bytes);
  return std::min(24, left / stage_bytes(head_dim, head_dim_v, bytes));
}

constexpr int smem_bytes(int head_dim, int head_dim_v, int bytes) {
  return smem_bytes_of(stages(head_dim, head_dim_v, bytes), head_dim, head_dim_v, bytes);
}

}  // namespace flash_cute::sm90::decode::split_keys
