// The backward's producer: one thread brings the CTA's K and V once, and then Q, dO and their row statistics of
// every row tile of every query head, as far ahead of the consumers as there are buffers.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "../core/mask.cuh"
#include "bwd_args.cuh"
#include "load_tma.cuh"
#include "pipeline.cuh"

namespace flash_cute::sm90 {

template <class Traits, class SharedStorage>
CUTE_DEVICE void bwd_producer(BwdArgs const& args, SharedStorage& smem) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  constexpr uint32_t kKBytes = Traits::kKElements * sizeof(Element);
  constexpr uint32_t kStatBytes = kBlockM * sizeof(float);
  constexpr uint32_t kQBytes = Traits::kQElements * sizeof(Element) + kStatBytes;
  BwdParams const& params = args.params;
  KeyTile const tile(args);
  RowRange const range = row_range<typename Traits::Mask, kBlockM, kBlockN>(params, tile.n_block);
  if (range.begin == range.end) return;
  auto load_once = [&](CUtensorMap const& map, Pipeline<1>& pipeline, Element* place) {
    load_tile<Traits>(map, pipeline.expect({}, kKBytes), TMA::CacheHintSm90::EVICT_FIRST, place, kBlockN,
                      tile.n_block * kBlockN, tile.head_kv, tile.batch);
  };
  load_once(args.k, smem.k_pipeline, smem.k);
  load_once(args.v, smem.v_pipeline, smem.v);

  PipelineState<Traits::kStages> state;  // of Q and of dO alike
  int const first_head = tile.head_kv * args.group;
#pragma unroll 1
  for (int head = first_head; head < first_head + args.group; ++head) {
#pragma unroll 1
    for (int m = range.end - 1; m >= range.begin; --m) {
      int64_t const row = int64_t{(tile.batch * params.heads_q + head) * args.m_blocks + m} * kBlockM;
      auto load_rows = [&](CUtensorMap const& map, Pipeline<Traits::kStages>& pipeline, Element* place,
                           float const* stat, float* stat_place) {
        uint64_t* const full = pipeline.expect(state, kQBytes);
        load_tile<Traits>(map, full, TMA::CacheHintSm90::EVICT_LAST, place, kBlockM, m * kBlockM, head, tile.batch);
        SM90_BULK_COPY_G2S::copy(stat + row, full, stat_place, kStatBytes);
      };
      smem.q_pipeline.wait_empty(state);  // dK += dS^T Q of `kStages` steps ago is done in all warps
      load_rows(args.q, smem.q_pipeline, smem.q[state.stage], params.lse_log2, smem.lse_log2[state.stage]);
      smem.dout_pipeline.wait_empty(state);  // and dV += P^T dO
      load_rows(args.dout, smem.dout_pipeline, smem.dout[state.stage], params.delta, smem.delta[state.stage]);
      state.advance();
    }
  }
}

}  // namespace flash_cute::sm90
