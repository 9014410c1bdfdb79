// Which pages are too small for TMA.
#pragma once

#include <string>

namespace flash_cute::sm90::decode {

// A box of TMA takes as long for one row as for so many.
constexpr int kLeastBoxRows = 16;

// Whether rows are copied one by one (cp.async), since boxes of one page would have fewer rows. `least`: a power of
// two.
constexpr bool copies_rows(bool paged, int page_size, int least = kLeastBoxRows) {
  return paged && page_size % least != 0;
}

// `loaded_rows`: TMA loads sequences of so many rows and more; 0: none.
inline std::string note_of_copies(int page_size, int loaded_rows) {
  std::string const of = loaded_rows > 0 ? " of sequences of fewer rows than " + std::to_string(loaded_rows) : "";
  return "Pages of " + std::to_string(page_size) + " keys are no multiple of " + std::to_string(kLeastBoxRows) +
         ": keys" + of + " are copied row by row, not loaded by TMA in boxes.";
}

}  // namespace flash_cute::sm90::decode
