// What the CUDA kernels do not serve yet.
#pragma once

#include "checks.h"

namespace flash_cute {

// The sm80 backward that reads sequences at run time is not built yet.
inline void check_served_by_bwd(Backend backend, Variant variant) {
  FLASH_CUTE_CHECK(backend == Backend::kSm90 || variant == Variant::kDense,
                   "backend: expected 'sm90' for these options, which have no sm80 backward yet");
}

}  // namespace flash_cute
