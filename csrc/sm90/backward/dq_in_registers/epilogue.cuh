// Stores dK, dV or dQ: 64 rows of one warpgroup.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "sm90/common/pipeline.cuh"
#include "sm90/common/store_tma.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::backward::dq_in_registers {

// Stores a warpgroup's 64 x kColumns sums times `factor`, through `buffer` in shared memory, by TMA, which clips what
// is outside the tensor. `buffer` is operand A of the warpgroup's WGMMAs, and no other warpgroup reads it. It may be
// overwritten without a barrier: a warp writes the 16 rows that its own part of those WGMMAs reads, and it has waited
// for that part. What other warps may still have in flight is the last GEMM, on stale data, whose result is not used.
template <class Traits, int kColumns, class Accumulator, class Origin>
CUTE_DEVICE void store_sums(CUtensorMap const& map, typename Traits::Element* buffer, int warpgroup,
                            Accumulator const& sums,  // (MMA, MMA_M, MMA_D)
                            float factor, int row, int head,
                            Origin const& origin) {  // the batch, or a SequenceOrigin
  int const thread = threadIdx.x % 128;
  using Columns = typename Traits::template Columns<kColumns>;
  using Mma = typename Traits::template MmaSums<kColumns>;
  stage_rows<Mma, typename Traits::template SmemLayout<kColumns>>(buffer, thread, sums, factor);
  tma_store_fence();
  named_sync(kResults + warpgroup, 128);  // all threads of the warpgroup have written their share
  if (thread == 0) {
    store_tile<Columns>(map, buffer, 64, row, head, origin);
    tma_store_arrive();
    tma_store_wait<0>();  // shared memory must live until the TMA store has read it
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_registers
