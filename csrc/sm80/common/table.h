// The tile table of a plan, and what `explain` says of it.
#pragma once

#include <string>

#include "planning/problem.h"
#include "chip.h"

namespace flash_cute::sm80 {

inline int entry_of(Choice const& asked, Chip chip) { return asked.entry >= 0 ? asked.entry : chip; }

inline std::string chip_text(int chip) {
  return ", on chips with up to " + std::to_string(kMaxSmemBytes[chip] / 1024) + " KB of shared memory per CTA";
}

}  // namespace flash_cute::sm80
