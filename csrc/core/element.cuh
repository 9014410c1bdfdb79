// The choice of the kernels' element type by a plan's dtype, in a launch.
#pragma once

#include <cuda_runtime.h>

#include <cutlass/numeric_types.h>

#include "contract/plan.h"

namespace flash_cute {

// Calls `launch` with a value of the element type.
template <class Launch>
cudaError_t with_element(DType dtype, Launch const& launch) {
  return dtype == DType::kFloat16 ? launch(cutlass::half_t{}) : launch(cutlass::bfloat16_t{});
}

}  // namespace flash_cute
