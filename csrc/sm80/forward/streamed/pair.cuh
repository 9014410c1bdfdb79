// A CTA's partner, if it has one, see sm80/streaming/pair.cuh. The forward's messages are P, the maxima in use and the
// sums.
#pragma once

#include "sm80/streaming/pair.cuh"
#include "pair.h"

namespace flash_cute::sm80::forward::streamed {

using namespace cute;

// A CTA without a partner.
struct Alone {
  int part_;  // of out's columns

  CUTE_DEVICE int part() const { return part_; }
};

using Pair = streaming::Pair<Message>;

}  // namespace flash_cute::sm80::forward::streamed
