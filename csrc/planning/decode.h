// What the host asks of a kernel family that computes attention over a KV cache.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "contract/decode.h"
#include "family.h"
#include "kvcache.h"

namespace flash_cute {

// As FamilyOf for the other directions; there is one tile, so that nothing competes.
struct DecodeFamily {
  Backend backend;
  char const* name;
  bool row_invariant;  // serves those calls that ask for it
  bool (*serves)(HeadDims, KvCacheProblem const&);  // a call whose head dims the kernel holds
  void (*plan)(DecodePlan&, KvCacheProblem const&, Gpu);
  std::vector<std::string> (*notes)(DecodePlan const&, KvCacheProblem const&);
};

template <class Family>
constexpr DecodeFamily decode_family_of() {
  return {.backend = Family::kBackend,
          .name = Family::kName,
          .row_invariant = is_row_invariant<Family>(),
          .serves = &Family::serves,
          .plan = &Family::plan,
          .notes = &Family::notes};
}

}  // namespace flash_cute
