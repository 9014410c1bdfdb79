// Walks over the set bits of a list, see TileBits in contract/tile_mask.h.
#pragma once

#include <cute/config.hpp>

#include "contract/tile_mask.h"

namespace flash_cute {

CUTE_DEVICE bool is_set(uint32_t const* list, int number) { return __ldg(list + number / 32) >> number % 32 & 1; }

// The largest number below `end` whose bit is set; -1: none. `end` may be the list's end.
CUTE_DEVICE int last_set_before(uint32_t const* list, int end) {
  int const last = end - 1;
  int word = last >> 5;
  uint32_t bits = word < 0 ? 0 : __ldg(list + word) & ~0u >> (~last & 31);
  while (bits == 0) {
    if (--word < 0) return -1;
    bits = __ldg(list + word);
  }
  return 32 * word + 31 - __clz(bits);
}

// The smallest number from `begin` on whose bit is set. There is one.
CUTE_DEVICE int first_set_from(uint32_t const* list, int begin) {
  int word = begin >> 5;
  uint32_t bits = __ldg(list + word) & ~0u << (begin & 31);
  while (bits == 0) bits = __ldg(list + ++word);
  return 32 * word + __ffs(bits) - 1;
}

}  // namespace flash_cute
