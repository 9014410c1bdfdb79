// Two CTAs that share a tile, where out has more than kColumns columns: each computes half of the columns, and W of
// every second tile of the other side. They exchange W by messages in global memory, which stay in L2.
//
// Each CTA sends the k-th message before it waits for the other's k-th, and reads that before it sends the next: two
// slots per CTA suffice.
//
// A CTA waits for its partner, so that both must run at the same time, whatever else the GPU works on. CTAs draw
// tickets when they start, and those with tickets 2 i and 2 i + 1 are partners: at most one CTA of a grid waits for one
// that has not started. All other CTAs run beside their partners and end, no CTA waits for another pair, and each end
// makes room for the missing CTA: the GPU starts the CTAs of a grid before those of a later one. Where priorities of
// streams change that, a grid keeps at most one multiprocessor waiting, and there would have to be as many such grids
// at once as multiprocessors. A grid needs two of them; the plan gives a GPU of one the kernel without partners.
#pragma once

#include <cute/tensor.hpp>

#include "core/memory_order.cuh"
#include "pair.h"

namespace flash_cute::sm80::streaming {

using namespace cute;

template <class Message>
class Pair {
 public:
  // Of the CTA with this ticket, which has sent `count` messages. `messages`, `flags`: those of all pairs.
  CUTE_DEVICE Pair(Message* messages, int* flags, int ticket, int count = 0)
      : messages_(messages + ticket / 2 * (2 * kSlots)),
        flags_(flags + ticket / 2 * (2 * kFlagStride)),
        part_(ticket % 2),
        count_(count) {}

  CUTE_DEVICE int part() const { return part_; }

  // The message to be filled, and the other CTA's.
  CUTE_DEVICE Message& own() const { return messages_[part_ * kSlots + count_ % kSlots]; }
  CUTE_DEVICE Message const& other() const { return messages_[(1 - part_) * kSlots + (count_ - 1) % kSlots]; }

  // What all threads have stored in own(). Has a barrier.
  CUTE_DEVICE void send(int thread) {
    __syncthreads();
    ++count_;
    if (thread == 0) publish();
  }

  // Until other() is there. Ends with a barrier.
  CUTE_DEVICE void wait(int thread) const {
    if (thread == 0) wait();
    __syncthreads();
  }

  // The same by one thread, of what it alone has stored and reads; without barriers.
  CUTE_DEVICE void send() {
    ++count_;
    publish();
  }
  CUTE_DEVICE void wait() const {
    while (load_acquire(flags_ + (1 - part_) * kFlagStride) < count_) continue;
    __threadfence();
  }

 private:
  CUTE_DEVICE void publish() const {
    __threadfence();
    store_release(flags_ + part_ * kFlagStride, count_);
  }

  Message* messages_;
  int* flags_;
  int part_;
  int count_;  // messages sent
};

// W in the registers of the scores to a message, and back.
template <class Weights>
CUTE_DEVICE void store_message(Weights const& weights,  // (4, 2, 4), of Element
                               MessageWeights& message, int thread) {
  auto const words = recast<uint32_t>(weights);  // (2, 2, 4)
  CUTE_UNROLL
  for (int i = 0; i < MessageWeights::kVectors; ++i) {
    message.vectors[i][thread] = {words(4 * i), words(4 * i + 1), words(4 * i + 2), words(4 * i + 3)};
  }
}
template <class Weights>
CUTE_DEVICE void load_message(MessageWeights const& message, int thread,
                              Weights& weights) {  // (4, 2, 4), of Element
  auto words = recast<uint32_t>(weights);  // (2, 2, 4)
  CUTE_UNROLL
  for (int i = 0; i < MessageWeights::kVectors; ++i) {
    uint4 const vector = __ldcg(reinterpret_cast<uint4 const*>(&message.vectors[i][thread]));
    words(4 * i) = vector.x;
    words(4 * i + 1) = vector.y;
    words(4 * i + 2) = vector.z;
    words(4 * i + 3) = vector.w;
  }
}

}  // namespace flash_cute::sm80::streaming
