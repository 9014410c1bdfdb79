// What two CTAs that share a tile of a gradient exchange, and where it lies in the workspace: for host and device.
#pragma once

#include "sm80/streaming/pair.h"

namespace flash_cute::sm80::backward::streamed {

struct Message {
  streaming::MessageWeights weights;  // P^T of dV, dS^T of dK, dS of dQ
  int unit;  // of work: the pair's next one
};

// Of a kernel's pairs.
struct PairMemory {
  int* tickets;  // of the CTAs; zeroed before the kernel, and so are the next two
  int* units;    // (2): that pairs have drawn of each gradient of the kernel
  int* flags;    // of each CTA: the messages that it has sent
  Message* messages;
};

// The counters and flags of both kernels, and then the messages, which they use one after the other. `pairs`: the most
// of a kernel.
constexpr int64_t kCounterBytes = 128;
constexpr int64_t zeroed_bytes_of_kernel(int64_t pairs) { return kCounterBytes + pairs * streaming::kFlagBytesPerPair; }
constexpr int64_t zeroed_bytes(int64_t pairs) { return 2 * zeroed_bytes_of_kernel(pairs); }
constexpr int64_t pair_bytes(int64_t pairs) {
  return zeroed_bytes(pairs) + pairs * streaming::kMessageBytesPerPair<Message>;
}

// `kernel`: 0 or 1.
inline PairMemory pair_memory(void* workspace, int64_t pairs, int kernel) {
  char* const bytes = static_cast<char*>(workspace);
  char* const zeroed = bytes + kernel * zeroed_bytes_of_kernel(pairs);
  return {.tickets = reinterpret_cast<int*>(zeroed),
          .units = reinterpret_cast<int*>(zeroed) + 1,
          .flags = reinterpret_cast<int*>(zeroed + kCounterBytes),
          .messages = reinterpret_cast<Message*>(bytes + zeroed_bytes(pairs))};
}

// A unit of a pair's work is a tile of a gradient with two parts of its columns, one per CTA, or two tiles of a
// gradient with one part.
constexpr int64_t units(int64_t tiles, int column_parts) { return column_parts == 2 ? tiles : (tiles + 1) / 2; }

}  // namespace flash_cute::sm80::backward::streamed
