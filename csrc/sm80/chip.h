// Which of the sm80 tile tables a GPU uses. Plain constants, for host and device.
#pragma once

namespace flash_cute::sm80 {

// Chips that need tables of their own.
enum Chip : int {
  kA100 = 0,     // sm_80, sm_87 and newer data-centre parts forced onto this path: 163 KB a CTA
  kSmem99K = 1,  // sm_86, sm_89, sm_120: 99 KB a CTA
  kH100 = 2,     // sm_90 forced onto this path: 227 KB a CTA
  kNumChips = 3,
};

constexpr int kMaxSmemBytes[kNumChips] = {163 * 1024, 99 * 1024, 227 * 1024};

}  // namespace flash_cute::sm80
