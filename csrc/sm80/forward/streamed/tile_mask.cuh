// The mask of a row tile's head, where the call has one: a run-time value of these kernels.
#pragma once

#include "core/head_mask.cuh"
#include "sm80/forward/common/sequence_tile.h"

namespace flash_cute::sm80::forward::streamed {

CUTE_DEVICE HeadMask head_mask(FwdParams const& params, forward::SequenceTile const& tile) {
  int const head_kv = tile.coord.head / (params.heads_q / params.heads_kv);
  return {params.mask, tile.coord.batch, head_kv, tile.sequence.len_q, tile.sequence.len_k};
}

}  // namespace flash_cute::sm80::forward::streamed
