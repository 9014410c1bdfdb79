// The choice of a kernel by a plan's variant, in a launch.
#pragma once

#include <cuda_runtime.h>

#include "contract/variant.h"

namespace flash_cute {

// Calls `launch` with that of the variants which is `variant`.
template <Variant... kVariants, class Launch>
cudaError_t with_variant(Variant variant, Launch const& launch) {
  cudaError_t error = cudaErrorInvalidValue;
  (void)((variant == kVariants && (error = launch.template operator()<kVariants>(), true)) || ...);
  return error;
}

}  // namespace flash_cute
