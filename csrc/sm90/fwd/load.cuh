// The producer: one thread loads Q, K and V of every tile into shared memory by TMA, as far ahead of the consumers as
// there are stages, also across tiles.
#pragma once

#include "../../core/mask.cuh"
#include "../load_tma.cuh"
#include "args.cuh"
#include "scheduler.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::fwd {

template <class Traits>
CUTE_DEVICE void producer(KernelArgs const& args, typename Traits::SharedStorage& smem) {
  constexpr int kBlockN = Traits::kBlockN;
  constexpr uint32_t kKVBytes = Traits::kKVElements * sizeof(typename Traits::Element);
  constexpr uint32_t kQBytes = Traits::kQElements * sizeof(typename Traits::Element);
  FwdParams const& params = args.params;
  int count = 0;  // key tiles loaded so far, over all row tiles: selects the stage
  // A CTA waits only for parts of CTAs of lower number. So numbers are drawn from the ticket: CUDA does not promise the
  // order in which CTAs start.
  int const number = params.split.tiles > 0 ? atomicAdd(params.ticket, 1) : blockIdx.x;
  smem.range = split_range(params.split, number);  // published together with the first tile
#pragma unroll 1
  for (int draws = 0;; ++draws) {
    smem.tile_pipeline.wait_empty(at_step(draws));  // all consumer warps have finished the tile of two draws before
    TileCoord volatile& tile = smem.tile[draws & 1];
    if (params.draws_tiles) {
      place_tile(params.order, atomicAdd(params.ticket, 1), tile);
    } else {
      deal_tile(params.order, params.split, number, gridDim.x, draws, tile);
    }
    TileRange const range = key_range<Traits::kBlockM, kBlockN>(params, tile.m_block);
    int const begin = max(tile.keys.begin, range.begin), end = max(begin, min(tile.keys.end, range.end));
    tile.keys.begin = begin;
    tile.keys.end = end;
    tile.keys.count = count;
    smem.tile_pipeline.publish(at_step(draws));
    if (tile.m_block < 0) break;

    auto load_keys = [&](int n, int i, CUtensorMap const& map, auto& pipeline, auto& place) {  // i: as `count`
      PipelineState<2> const state = at_step(i);
      pipeline.wait_empty(state);  // all consumer warps have finished the GEMM with this stage, of two steps ago
      load_tile<Traits>(map, pipeline.expect(state, kKVBytes), TMA::CacheHintSm90::EVICT_LAST, place[state.stage],
                        kBlockN, n * kBlockN, tile.head_kv, tile.batch);
    };
    if (end > begin) load_keys(end - 1, count, args.k, smem.k_pipeline, smem.k);
#pragma unroll 1
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      // The warpgroup's four warps have finished all GEMMs with the last tile's Q.
      PipelineState<1> const state{0, draws & 1};
      smem.q_pipeline[wg].wait_empty(state);
      load_tile<Traits>(args.q, smem.q_pipeline[wg].expect(state, kQBytes), TMA::CacheHintSm90::EVICT_FIRST, smem.q[wg],
                        Traits::kRows, tile.m_block * Traits::kBlockM + wg * Traits::kRows, tile.head, tile.batch);
    }
#pragma unroll 1
    for (int n = end - 1; n >= begin; --n, ++count) {  // in the order in which the consumers use them
      if (n > begin) load_keys(n - 1, count + 1, args.k, smem.k_pipeline, smem.k);
      load_keys(n, count, args.v, smem.v_pipeline, smem.v);
    }
  }
}

}  // namespace flash_cute::sm90::fwd
