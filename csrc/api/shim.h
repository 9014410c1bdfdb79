// PyTorch's C shim, whose functions return an error code.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <memory>
#include <stdexcept>
#include <string>

// Weak: only later versions of PyTorch have it. The others print the message.
extern "C" __attribute__((weak)) char const* torch_exception_get_what_without_backtrace();

namespace flash_cute {

[[noreturn, gnu::noinline, gnu::cold]] inline void fail_shim(char const* action) {
  bool const has_message = &torch_exception_get_what_without_backtrace != nullptr;
  throw std::runtime_error(std::string("flash_cute: PyTorch could not ") + action +
                           (has_message ? std::string(": ") + torch_exception_get_what_without_backtrace()
                                        : "; its own message stands on stderr"));
}

inline void check_shim(AOTITorchError code, char const* action) {
  if (__builtin_expect(code != 0, 0)) fail_shim(action);
}

}  // namespace flash_cute
