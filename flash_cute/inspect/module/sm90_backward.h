// What the facts of the sm90 backwards have in common.
#pragma once

#include "describe.h"
#include "kernel_shape.h"
#include "problem.h"

namespace inspect::sm90_backward {

using namespace flash_cute;

constexpr int kSmemLimit = 227 * 1024;

template <class Traits>
std::map<std::string, int> facts_of(int block_m, int block_n, size_t smem_bytes) {
  return {{"block_m", block_m},
          {"block_n", block_n},
          {"threads", Traits::kThreads},
          {"stages", Traits::kStages},
          {"smem_bytes", int(smem_bytes)},
          {"smem_limit", kSmemLimit},
          {"warpgroups", Traits::kWarpgroups},
          {"producer_registers", Traits::kProducerRegs},
          {"consumer_registers", Traits::kConsumerRegs}};
}

// What comes before the barriers, and those.
#define FLASH_CUTE_BUFFER(name, field) Buffer{name, int(offsetof(Storage, field)), int(sizeof(Storage::field))}
template <class Storage>
Details buffers_of(std::vector<Buffer> buffers) {
  int const end = buffers.back().offset + buffers.back().bytes;
  buffers.push_back({"the rest", end, int(sizeof(Storage)) - end});
  return {.buffers = buffers};
}

}  // namespace inspect::sm90_backward
