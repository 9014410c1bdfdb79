// What follows from the head dims: plain constants.
#pragma once

#include "contract/split_keys.h"

namespace flash_cute::sm80::decode::split_keys {

using flash_cute::split_keys::kConsumerWarps;
using flash_cute::split_keys::tile_keys;

constexpr int kStages = 4;
constexpr int kLeastSmemOfChips = 99 * 1024;  // sm_86, sm_89 and sm_120 have no more for a CTA

constexpr int smem_bytes(int head_dim, int head_dim_v) {
  return flash_cute::split_keys::smem_bytes_of(kStages, head_dim, head_dim_v, 2);
}

}  // namespace flash_cute::sm80::decode::split_keys
