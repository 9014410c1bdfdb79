// Reads a sequence that the producer has left in shared memory.
#pragma once

#include "../../core/sequence.cuh"
#include "../warpgroup.cuh"

namespace flash_cute::sm90::bwd {

// The fields of a sequence that mask and score need, read from shared memory at each use, and for branches made
// uniform.
CUTE_DEVICE Sequence read_band(Sequence const volatile& sequence) {
  return {.len_q = sequence.len_q,
          .len_k = sequence.len_k,
          .band = {.lower = sequence.band.lower, .upper = sequence.band.upper},
          .shift = sequence.shift};
}
CUTE_DEVICE Sequence read_uniform(Sequence const volatile& sequence) {
  return {.len_q = uniform(sequence.len_q),
          .len_k = uniform(sequence.len_k),
          .band = {.lower = uniform(sequence.band.lower), .upper = uniform(sequence.band.upper)}};
}

}  // namespace flash_cute::sm90::bwd
