// What two CTAs that share a row tile exchange, see pair.cuh: sizes, for host and device.
#pragma once

#include "sm80/streaming/pair.h"

namespace flash_cute::sm80::forward::streamed {

struct Message {
  streaming::MessageWeights weights;  // P: a word per row
  float statistics[2][streaming::kBlockM];  // the offsets and limits; at the end the numerators' sums and their errors
};

}  // namespace flash_cute::sm80::forward::streamed
