// What two CTAs that share a row tile exchange, see pair.cuh: sizes, for host and device.
#pragma once

#include "../large/pair.h"

namespace flash_cute::sm80::fwd_large {

struct Message {
  large::MessageWeights weights;  // P: a word per row
  float statistics[2][large::kBlockM];  // the offsets and limits; at the end: sums of the numerators and their errors
};

}  // namespace flash_cute::sm80::fwd_large
