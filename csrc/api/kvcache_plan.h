// The plan of a call over a cache: which kernel, its grid, its workspace. The launch and `explain` read it.
#pragma once

#include "families.h"
#include "kvcache.h"

namespace flash_cute {

struct DecodeDecision {
  DecodeInstance const* instance = nullptr;
  Gpu gpu = {};
  DecodePlan plan = {};

  Backend backend() const { return instance->family->backend; }
};

// Of a KV head; of packed rows at most.
int64_t row_tiles(Problem const& call, DecodePlan const& plan);

DecodeDecision plan_decode(KvCacheArgs const& args, KvCacheProblem const& problem, Gpu gpu);

}  // namespace flash_cute
