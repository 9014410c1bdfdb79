// A KernelShape as data.
#pragma once

#include <map>
#include <string>

#include "contract/kernel_shape.h"

namespace inspect {

inline std::map<std::string, int> shape_of(flash_cute::KernelShape const& shape) {
  return {{"block_m", shape.block_m}, {"block_n", shape.block_n},       {"threads", shape.threads},
          {"stages", shape.stages},   {"smem_bytes", shape.smem_bytes}, {"ctas_per_sm", shape.ctas_per_sm}};
}

}  // namespace inspect
