// Attention sinks (arXiv 2309.17453; learned ones as in gpt-oss): a row's denominator gains exp(sink) of its head.
#pragma once

#include <cute/tensor.hpp>

#include "contract/params.h"

namespace flash_cute {

using namespace cute;

// A head's sink times log2(e); -inf where there are none.
template <class Element>
CUTE_DEVICE float head_sink_log2(Sinks const& sinks, int head) {
  constexpr float kLog2e = 1.4426950408889634f;
  if (sinks.data == nullptr) return -INFINITY;
  int64_t const index = head * sinks.stride;
  return kLog2e * (sinks.is_float32 ? static_cast<float const*>(sinks.data)[index]
                                    : static_cast<float>(static_cast<Element const*>(sinks.data)[index]));
}

}  // namespace flash_cute
