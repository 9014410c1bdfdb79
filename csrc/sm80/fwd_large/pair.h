// What two CTAs that share a row tile exchange, see pair.cuh: sizes, for host and device.
#pragma once

#include <cstdint>

#include "../large/tile.h"

namespace flash_cute::sm80::fwd_large {

struct Message {
  static constexpr int kVectors = large::kWeightBytes / (16 * large::kThreads);
  struct alignas(16) Vector {
    uint32_t words[4];
  };
  Vector weights[kVectors][large::kThreads];  // of P, each thread's registers: a word per row
  float statistics[2][large::kBlockM];  // the offsets and limits; at the end: sums of the numerators and their errors
};

constexpr int kSlots = 2;       // per CTA
constexpr int kFlagStride = 32;  // of the CTAs' flags: the number of messages sent

constexpr int64_t kFlagBytesPerPair = 2 * kFlagStride * 4;
constexpr int64_t kMessageBytesPerPair = 2 * kSlots * sizeof(Message);

}  // namespace flash_cute::sm80::fwd_large
