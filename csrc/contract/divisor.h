// A number by which kernels divide, and which the host knows.
#pragma once

#include <cstdint>

namespace flash_cute {

// Numbers from 0 to 2^31 - 1 are divided by a multiplication and a shift, where a GPU takes some 20 instructions to
// divide by a number that it does not know: where a kernel's instructions come from memory they are its start.
// (T. Granlund, P. Montgomery: Division by invariant integers using multiplication, 1994.) A divisor of 0 divides as 1.
// Not cutlass::FastDivmod, since the host's files, which plan and check, are compiled without CUTLASS.
class Divisor {
 public:
  constexpr Divisor(int value = 1) : value_(value) {  // NOLINT: an int is one
    while (shift_ < 31 && (int64_t{1} << shift_) < value) ++shift_;
    uint64_t const by = value > 1 ? uint64_t(value) : 1;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << (31 + shift_)) + by - 1) / by);
  }

  constexpr operator int() const { return value_; }

  friend constexpr int operator/(int number, Divisor const& divisor) {
    return static_cast<int>(uint64_t{static_cast<uint32_t>(number)} * divisor.multiplier_ >> (31 + divisor.shift_));
  }
  friend constexpr int operator%(int number, Divisor const& divisor) {
    return number - number / divisor * divisor.value_;
  }

 private:
  int value_;
  int shift_ = 0;  // 2^shift is the first power of two that is not below the divisor
  uint32_t multiplier_ = 0;
};

}  // namespace flash_cute
