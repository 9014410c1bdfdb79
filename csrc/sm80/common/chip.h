// Selects the sm80 tile table of a GPU. Plain constants, for host and device.
#pragma once

namespace flash_cute::sm80 {

// The classes of chips that have tables of their own.
enum Chip : int {
  kA100 = 0,     // sm_80, sm_87 and newer data-centre parts forced onto this path: 163 KB per CTA
  kSmem99K = 1,  // sm_86, sm_89, sm_120: 99 KB per CTA
  kH100 = 2,     // sm_90 forced onto this path: 227 KB per CTA
  kNumChips = 3,
};

constexpr char const* kChipNames[kNumChips] = {"a100", "99kb", "h100"};
constexpr int kMaxSmemBytes[kNumChips] = {163 * 1024, 99 * 1024, 227 * 1024};

// An unknown chip gets the table that needs the least shared memory.
constexpr Chip chip_of(int capability) {
  if (capability == 90) return kH100;
  if (capability == 80 || capability == 87 || capability / 10 == 10) return kA100;
  return kSmem99K;
}

}  // namespace flash_cute::sm80
