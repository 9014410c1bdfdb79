// Which pages are too small for TMA.
#pragma once

#include <string>

namespace flash_cute::sm90::decode {

// A box of TMA takes as long for one row as for so many.
constexpr int kLeastBoxRows = 16;

// Whether rows are copied one by one (cp.async), since boxes of one page would have fewer.
constexpr bool copies_rows(bool paged, int page_size) { return paged && page_size % kLeastBoxRows != 0; }

inline std::string note_of_copies(int page_size) {
  return "Pages of " + std::to_string(page_size) + " keys are no multiple of " + std::to_string(kLeastBoxRows) +
         ": rows are copied one by one, not loaded by TMA in boxes.";
}

}  // namespace flash_cute::sm90::decode
