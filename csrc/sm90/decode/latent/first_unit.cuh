// What the merge kernel knows of a bundle: the unit of work with which its range begins. The decode kernel, which has
// found it, records it in the workspace: to find it again would take longer than to fold the parts, since no CTA of the
// merge kernel can start before one of the decode kernel has ended.
#pragma once

#include <cute/tensor.hpp>

#include "core/split_keys/work.cuh"
#include "tile.h"

namespace flash_cute::sm90::decode::latent {

using flash_cute::split_keys::Unit;

struct alignas(16) FirstUnit {
  Unit unit;   // of no rows: the range is empty
  int first;   // the place of its first piece, in key tiles of all units
  int range;   // key tiles of a range
  int total;   // and of all
};
static_assert(sizeof(FirstUnit) == kFirstUnitBytes && offsetof(FirstUnit, first) == sizeof(Unit));

// Behind the parts.
CUTE_DEVICE FirstUnit* first_unit_of(DecodeParams const& params, int bundle) {
  int64_t const rows = int64_t{params.bundles} * params.heads_kv * params.part_rows;
  return reinterpret_cast<FirstUnit*>(params.parts + rows * (kHeadDimV + 2)) + bundle;
}

}  // namespace flash_cute::sm90::decode::latent
