// The producer: one thread brings every tile's Q, K and V into shared memory by TMA, as far ahead of the
// consumers as there are buffers, across tiles too.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "../core/mask.cuh"
#include "fwd_args.cuh"
#include "fwd_traits.cuh"

namespace flash_cute::sm90 {

// One TMA box is kChunk columns of a tile; the map is (column, row, head, batch). What lies outside the
// tensor arrives as zeros and still counts as bytes.
template <class Traits>
CUTE_DEVICE void load_tile(CUtensorMap const& map, uint64_t* full, TMA::CacheHintSm90 hint,
                           typename Traits::Element* smem, int rows, int row, int head, int batch) {
  CUTE_UNROLL
  for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
    SM90_TMA_LOAD_4D::copy(&map, full, static_cast<uint64_t>(hint), smem + chunk * rows * Traits::kChunk,
                           chunk * Traits::kChunk, row, head, batch);
  }
}

template <class Traits>
CUTE_DEVICE void fwd_producer(FwdArgs const& args, typename Traits::SharedStorage& smem) {
  constexpr int kBlockN = Traits::kBlockN;
  constexpr uint32_t kKVBytes = Traits::kKVElements * sizeof(typename Traits::Element);
  constexpr uint32_t kQBytes = Traits::kQElements * sizeof(typename Traits::Element);
  FwdParams const& params = args.params;
  PipelineState<Traits::kStages> k_state, v_state;
  PipelineState<1> q_state;

  for (TileIterator work(args.schedule); work.valid(); work.next()) {
    TileCoord const tile = work.tile();
    int const head_kv = tile.head / args.heads_per_kv;
    KeyRange const range = key_range<typename Traits::Mask, Traits::kBlockM, kBlockN>(params, tile.m_block);

    auto load_k = [&](int n) {
      smem.k_pipeline.wait_empty(k_state);  // S = Q K of the step `kStages` ago is done in all warps
      load_tile<Traits>(args.k, smem.k_pipeline.expect(k_state, kKVBytes), TMA::CacheHintSm90::EVICT_LAST,
                        smem.k[k_state.stage], kBlockN, n * kBlockN, head_kv, tile.batch);
      k_state.advance();
    };
    auto load_v = [&](int n) {
      smem.v_pipeline.wait_empty(v_state);  // O += P V of the step `kStages` ago is done in all warps
      load_tile<Traits>(args.v, smem.v_pipeline.expect(v_state, kKVBytes), TMA::CacheHintSm90::EVICT_LAST,
                        smem.v[v_state.stage], kBlockN, n * kBlockN, head_kv, tile.batch);
      v_state.advance();
    };

    if (range.end > 0) load_k(range.end - 1);
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      // The warpgroup has read the last tile's Q for the last time; where O shares its place, O has left too.
      smem.q_pipeline[wg].wait_empty(q_state);
      load_tile<Traits>(args.q, smem.q_pipeline[wg].expect(q_state, kQBytes), TMA::CacheHintSm90::EVICT_FIRST,
                        smem.q(wg), Traits::kRows, tile.m_block * Traits::kBlockM + wg * Traits::kRows, tile.head,
                        tile.batch);
    }
    q_state.advance();
    for (int n = range.end - 1; n >= 0; --n) {  // the order in which the consumers want them
      if (n > 0) load_k(n - 1);
      load_v(n);
    }
  }
}

}  // namespace flash_cute::sm90
