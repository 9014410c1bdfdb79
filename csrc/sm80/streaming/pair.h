// What two CTAs that share a tile exchange, see pair.cuh: sizes, for host and device.
#pragma once

#include <cstdint>

#include "tile.h"

namespace flash_cute::sm80::streaming {

// W of a tile, 16-bit, as the threads have it in the registers of the scores.
struct MessageWeights {
  static constexpr int kVectors = kWeightBytes / (16 * kThreads);
  struct alignas(16) Vector {
    uint32_t words[4];
  };
  Vector vectors[kVectors][kThreads];
};

constexpr int kSlots = 2;        // per CTA
constexpr int kFlagStride = 32;  // of the CTAs' flags: the number of messages sent

constexpr int64_t kFlagBytesPerPair = 2 * kFlagStride * 4;
template <class Message>
constexpr int64_t kMessageBytesPerPair = 2 * kSlots * sizeof(Message);

}  // namespace flash_cute::sm80::streaming
