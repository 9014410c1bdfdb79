// How an error is worded and thrown.
//
// An error reads "flash_cute: <argument>: expected <what>, got <what>". It is thrown as std::invalid_argument, which
// Python sees as ValueError (with torch 2.15 as RuntimeError, which flash_cute.fwd and explain recognise by the
// message's beginning and turn into ValueError again).
#pragma once

#include <sstream>
#include <stdexcept>

namespace flash_cute {

// The message is formatted only when the check fails.
template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail(Parts const&... parts) {
  std::ostringstream message;
  message << "flash_cute: ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}
#define FLASH_CUTE_CHECK(condition, ...)                                    \
  do {                                                                      \
    if (__builtin_expect(!(condition), 0)) ::flash_cute::fail(__VA_ARGS__); \
  } while (0)

}  // namespace flash_cute
