// Where a thread's numerators are in P's A operand. Its keys have the order in which transpose.cuh leaves those of V,
// so that four neighbouring bytes of the operand are four scores that the thread has one after the other.
#pragma once

#include <cute/config.hpp>

namespace flash_cute::sm90::forward::fp8_rows {

// The word of the operand that has the numerators 4 * four to 4 * four + 3 of a thread's row `row`, which is 0 or 1.
CUTE_HOST_DEVICE constexpr int word_of_numerators(int row, int four) { return four / 2 * 4 + four % 2 * 2 + row; }

}  // namespace flash_cute::sm90::forward::fp8_rows
