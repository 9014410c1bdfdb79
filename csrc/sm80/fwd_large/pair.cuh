// Two CTAs that share a row tile, where out has more than kColumns columns: each computes half of the columns, and the
// scores of every second key tile. They exchange P, the maxima in use and the sums by messages in global memory.
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

#include "../../core/memory_order.cuh"
#include "../../params.h"
#include "pair.h"

namespace flash_cute::sm80::fwd_large {

using namespace cute;

// A CTA without a partner.
struct Alone {
  int part_;  // of out's columns

  CUTE_DEVICE int part() const { return part_; }
};

class Pair {
 public:
  // Of the CTA with this ticket.
  CUTE_DEVICE Pair(FwdParams const& params, int ticket)
      : messages_(reinterpret_cast<Message*>(params.parts) + ticket / 2 * (2 * kSlots)),
        flags_(params.part_flags + ticket / 2 * (2 * kFlagStride)),
        part_(ticket % 2) {}

  CUTE_DEVICE int part() const { return part_; }

  // The message to be filled, and the other CTA's.
  CUTE_DEVICE Message& own() const { return messages_[part_ * kSlots + count_ % kSlots]; }
  CUTE_DEVICE Message const& other() const { return messages_[(1 - part_) * kSlots + (count_ - 1) % kSlots]; }

  // What all threads have stored in own(). Has a barrier.
  CUTE_DEVICE void send(int thread) {
    __syncthreads();
    ++count_;
    if (thread != 0) return;
    __threadfence();
    store_release(flags_ + part_ * kFlagStride, count_);
  }

  // Until other() is there. Ends with a barrier.
  CUTE_DEVICE void wait(int thread) const {
    if (thread == 0) {
      while (load_acquire(flags_ + (1 - part_) * kFlagStride) < count_) continue;
      __threadfence();
    }
    __syncthreads();
  }

 private:
  Message* messages_;
  int* flags_;
  int part_;
  int count_ = 0;  // messages sent
};

}  // namespace flash_cute::sm80::fwd_large
