// Stores dK and dV where a warpgroup's dQ buffer has no room for both: first dV, then dK. Otherwise as epilogue.cuh.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "dq.cuh"
#include "mla_traits.cuh"
#include "sm90/backward/common/scores.cuh"
#include "task.cuh"
#include "sm90/common/store_tma.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

// Stores a warpgroup's 64 rows of a result of kColumns columns through its dQ buffer, which must be free. The TMA
// stores are in flight when it returns.
template <class Traits, int kColumns, class Accumulator>
CUTE_DEVICE void store_result(KernelArgs const& args, KeyTile const& tile, int task_number,
                              typename Traits::SharedStorage& smem, CUtensorMap const& map,
                              Accumulator const& sums,  // (MMA, MMA_N, MMA_D)
                              float factor) {
  using Element = typename Traits::Element;
  using Columns = typename Traits::template Columns<kColumns, Traits::kChunk>;
  int const thread = consumer_thread(), warpgroup = thread / 128;
  auto* const buffer = reinterpret_cast<Element*>(smem.dq[warpgroup][0]);
  static_assert(sizeof(smem.dq[0][0]) >= Traits::kKeys * kColumns * sizeof(Element));
  stage_rows<typename Traits::template MmaOut<kColumns>, typename Traits::template SmemLayoutOut<kColumns>>(
      buffer, thread % 128, sums, factor);
  tma_store_fence();
  named_sync(kResults + warpgroup, 128);  // all threads of the warpgroup have written their share
  if (thread % 128 > 0) return;
  int const row = tile.n_block * Traits::kBlockN + warpgroup * Traits::kKeys;
  auto const origin = origin_of_results(args.params, smem.task[task_number & 1]);
  store_tile<Columns>(map, buffer, Traits::kKeys, row, tile.head_kv, origin);
  tma_store_arrive();
}

template <class Traits, class AccumulatorK, class AccumulatorV>
CUTE_DEVICE void mla_epilogue(KernelArgs const& args, KeyTile const& tile, int task_number,
                              typename Traits::SharedStorage& smem,
                              AccumulatorK const& tdKrdK,    // (MMA, MMA_N, MMA_D)
                              AccumulatorV const& tdVrdV) {  // (MMA, MMA_N, MMA_DV)
  int const warpgroup = consumer_thread() / 128;
  wait_dq_buffer<Traits>(smem, warpgroup, tile.end);
  store_result<Traits, Traits::kHeadDimV>(args, tile, task_number, smem, args.dv, tdVrdV, Traits::kSumsFactor);
  wait_results_read();
  float const factor = args.params.scale * Traits::kSumsFactor;
  store_result<Traits, Traits::kHeadDim>(args, tile, task_number, smem, args.dk, tdKrdK, factor);
}

}  // namespace flash_cute::sm90::backward::dq_in_memory
