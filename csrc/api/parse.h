// The arguments that are given as text: the mask, and the backend with what its name may go on with.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "call.h"
#include "sm80/common/chip.h"
#include "sm90/forward/rows/tile.h"

namespace flash_cute {

inline Causal parse_causal(std::string_view causal) {
  if (causal == "none") return Causal::kNone;
  if (causal == "top_left") return Causal::kTopLeft;
  if (causal == "bottom_right") return Causal::kBottomRight;
  fail("causal: expected False or 'none', True or 'bottom_right', or 'top_left', got '", causal, "'");
}

inline Backend parse_backend(std::string_view backend) {
  if (backend == "auto") return Backend::kAuto;
  if (backend == "cpu") return Backend::kCpu;
  if (backend == "sm80") return Backend::kSm80;
  if (backend == "sm90") return Backend::kSm90;
  fail("backend: expected 'auto', 'cpu', 'sm80' or 'sm90', got '", backend, "'");
}

// A backend's name may go on with a tile and with whether the tiles of the last wave are split: "sm80:a100",
// "sm90:rows64", "sm90:rows192:whole". On sm80 the tile is that of the chip's table.
inline Choice parse_choice(std::string_view text) {
  Choice choice{.backend = parse_backend(text.substr(0, text.find(':')))};
  for (size_t colon = text.find(':'); colon != std::string_view::npos;) {
    size_t const next = text.find(':', colon + 1);
    std::string_view const word = text.substr(colon + 1, next - colon - 1);  // to the end where next is npos
    colon = next;
    auto const find = [&](auto const& names) {
      auto const found = std::find(std::begin(names), std::end(names), word);
      return found == std::end(names) ? -1 : static_cast<int>(found - std::begin(names));
    };
    int const entry = choice.backend == Backend::kSm80   ? find(sm80::kChipNames)
                      : choice.backend == Backend::kSm90 ? find(sm90::forward::rows::kEntryNames)
                                                         : -1;
    int const split = find(std::array<std::string_view, 2>{"whole", "split"});
    FLASH_CUTE_CHECK(entry >= 0 || split >= 0, "backend: expected a tile or a table that exists, got '", text, "'");
    if (entry >= 0) choice.entry = entry;
    if (split >= 0) choice.split = split;
  }
  return choice;
}

// Whether this thread measures choices (flash_cute.tune): it may name them, and no tuning table applies.
inline thread_local bool tuner_is_running = false;

// Besides the tuner, tests may name a choice: if FLASH_CUTE_TEST_TILES is set at the first call.
inline bool choices_allowed() {
  static bool const allowed = std::getenv("FLASH_CUTE_TEST_TILES") != nullptr;
  return allowed || tuner_is_running;
}

// Over a cache the name may go on with the number of multiprocessors that the plan counts with, as a smaller chip has
// them: "sm90:sms66". Takes it off the text; 0: there is none.
inline int take_multiprocessors(std::string_view& text) {
  constexpr std::string_view kWord = ":sms";
  size_t const begin = text.rfind(kWord);
  if (begin == std::string_view::npos || !choices_allowed()) return 0;
  std::string_view const digits = text.substr(begin + kWord.size());
  int number = 0;
  auto const [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  FLASH_CUTE_CHECK(error == std::errc{} && end == digits.data() + digits.size() && number > 0,
                   "backend: expected a number of multiprocessors behind '", kWord, "', got '", text, "'");
  text = text.substr(0, begin);
  return number;
}

inline AccumulateIn parse_accumulate(std::string_view text) {
  auto const& names = kAccumulateNames;
  auto const found = std::find(std::begin(names), std::end(names), text);
  FLASH_CUTE_CHECK(found != std::end(names),
                   "accumulate: expected 'float32', 'float16', 'float16_qk' or 'float16_pv', got '", text, "'");
  return static_cast<AccumulateIn>(found - std::begin(names));
}

// A backend's name may end so; over a cache with either.
constexpr std::string_view kRowInvariant = "+row_invariant";
constexpr std::string_view kBatchDependent = "+batch_dependent";

// Whether the text ends with the word, which is taken off.
inline bool take_ending(std::string_view& text, std::string_view word) {
  bool const found = text.ends_with(word);
  if (found) text.remove_suffix(word.size());
  return found;
}

// What a backend's name may end with before that, as in "auto+float16_pv", is what the products are accumulated in.
inline void parse_backend(std::string_view text, Problem& problem) {
  problem.row_invariant |= take_ending(text, kRowInvariant);
  if (size_t const found = text.find("+row_invariant+"); found != std::string_view::npos) {
    fail("row_invariant: expected False beside accumulate '", text.substr(text.rfind('+') + 1), "', got True");
  }
  if (size_t const plus = text.find('+'); plus != std::string_view::npos) {
    problem.accumulate = parse_accumulate(text.substr(plus + 1));
    text = text.substr(0, plus);
  }
  bool const only_backend = text.find(':') == std::string_view::npos || !choices_allowed();
  problem.asked = only_backend ? Choice{.backend = parse_backend(text)} : parse_choice(text);
}

}  // namespace flash_cute
