// Words of an accumulator to pieces of 8 columns.
#pragma once

#include <cute/tensor.hpp>

namespace flash_cute::sm90::forward {

// A 4 x 4 transpose within a quad: thread t has word t of four blocks, and gets the four words of block t.
CUTE_DEVICE uint4 quad_transpose(uint4 word, unsigned thread) {
  bool const odd = thread & 1, upper = thread & 2;
  auto exchange = [](uint32_t& low, uint32_t& high, bool keep_high, int distance) {
    uint32_t const other = __shfl_xor_sync(0xffffffff, keep_high ? low : high, distance);
    (keep_high ? low : high) = other;
  };
  exchange(word.x, word.y, odd, 1);
  exchange(word.z, word.w, odd, 1);
  exchange(word.x, word.z, upper, 2);
  exchange(word.y, word.w, upper, 2);
  return word;
}

}  // namespace flash_cute::sm90::forward
