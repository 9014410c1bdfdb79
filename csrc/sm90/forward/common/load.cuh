// The producer of the kernels whose CTA owns query rows: one thread loads Q, K and V of every tile into shared memory
// by TMA, as far ahead of the consumers as there are stages, also across tiles. `Args`: the kernel's, with the maps q,
// k and v and the parameters.
#pragma once

#include "core/mask.cuh"
#include "sm90/common/load_tma.cuh"
#include "sm90/common/sequence_map.cuh"
#include "scheduler.cuh"

namespace flash_cute::sm90::forward {

// Loads the tiles [begin, end) of K and V, from the last to the first, and Q, in the order in which the consumers use
// them. `count`: as in KeySpan. `load(columns, map, full, hint, smem, rows, row, head)` loads one tile.
// `prepare_next()` is called when `ahead` key tiles are left to load, if that is ever so.
template <class Traits, class Args, class Load, class PrepareNext>
CUTE_DEVICE void load_row_tile(Args const& args, typename Traits::SharedStorage& smem, int tile_number, int count,
                               TileCoord const volatile& tile, int begin, int end, Load const& load, int ahead,
                               PrepareNext const& prepare_next) {
  using ColumnsQK = typename Traits::ColumnsQK;
  using ColumnsV = typename Traits::ColumnsV;
  constexpr int kBlockN = Traits::kBlockN;
  constexpr int kElementBytes = sizeof(typename Traits::Element);
  constexpr uint32_t kQBytes = Traits::kQElements * kElementBytes;
  auto load_keys = [&](auto columns, int n, int i,  // i: as `count`
                       CUtensorMap const& map, auto& pipeline, auto& buffers) {
    constexpr uint32_t kBytes = kBlockN * decltype(columns)::kChunk * decltype(columns)::kChunks * kElementBytes;
    PipelineState<2> const state = at_step(i);
    pipeline.wait_empty(state);  // all consumer warps have finished the GEMM with this stage, of two steps ago
    load(columns, map, pipeline.expect(state, kBytes), TMA::CacheHintSm90::EVICT_LAST, buffers[state.stage], kBlockN,
         n * kBlockN, tile.head_kv);
  };
  if (end > begin) load_keys(ColumnsQK{}, end - 1, count, args.k, smem.k_pipeline, smem.k);
#pragma unroll 1
  for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
    // The warpgroup's four warps have finished all GEMMs with the Q that was there.
    auto const state = Traits::q_state(tile_number);
    smem.q_pipeline[wg].wait_empty(state);
    load(ColumnsQK{}, args.q, smem.q_pipeline[wg].expect(state, kQBytes), TMA::CacheHintSm90::EVICT_FIRST,
         smem.q[state.stage][wg], Traits::kRows, warpgroup_first_row<Traits>(args.params, tile.m_block, wg),
         warpgroup_head<Traits>(args.params, tile.head, wg));
  }
#pragma unroll 1
  for (int n = end - 1; n >= begin; --n, ++count) {
    if (n - begin == ahead) prepare_next();
    if constexpr (Traits::kValuesFirst) load_keys(ColumnsV{}, n, count, args.v, smem.v_pipeline, smem.v);
    if (n > begin) load_keys(ColumnsQK{}, n - 1, count + 1, args.k, smem.k_pipeline, smem.k);
    if constexpr (!Traits::kValuesFirst) load_keys(ColumnsV{}, n, count, args.v, smem.v_pipeline, smem.v);
  }
}

// Dense batches: the same thread schedules the tiles.
template <class Traits, class Args>
CUTE_DEVICE void producer(Args const& args, typename Traits::SharedStorage& smem) {
  FwdParams const& params = args.params;
  // A CTA waits only for parts of CTAs of lower number. So numbers are drawn from the ticket: CUDA does not promise the
  // order in which CTAs start.
  int const number = params.split.tiles > 0 ? atomicAdd(params.ticket, 1) : blockIdx.x;
  smem.range = split_range(params.split, number);  // published together with the first tile
  auto const publish_tile = [&](int tile_number, int count) {  // count: as in KeySpan
    smem.tile_pipeline.wait_empty(at_step(tile_number));  // all consumer warps have finished the tile before the last
    TileCoord volatile& tile = smem.tile[tile_number & 1];
    int index = deal_tile(params.split, number, gridDim.x, tile_number, tile);
    if (params.draws_tiles && tile_number > 0) index = int(gridDim.x) + atomicAdd(params.ticket, 1);
    place_tile(params.order, index, tile);
    TileRange const range = tile_range<Traits>(params, tile.m_block);
    int const begin = max(tile.keys.begin, range.begin), end = max(begin, min(tile.keys.end, range.end));
    tile.keys.begin = begin;
    tile.keys.end = end;
    tile.keys.count = count;
    smem.tile_pipeline.publish(at_step(tile_number));
  };
  // With one buffer of Q the next tile's first loads have to wait for it anyway.
  constexpr bool kEarly = Traits::kSmem.q_stages == 2;
  if constexpr (kEarly) publish_tile(0, 0);
  int next_count = 0;
#pragma unroll 1
  for (int tile_number = 0;; ++tile_number) {
    if constexpr (!kEarly) publish_tile(tile_number, next_count);
    TileCoord const volatile& tile = smem.tile[tile_number & 1];
    if (tile.m_block < 0) break;
    int const begin = tile.keys.begin, end = tile.keys.end, count = tile.keys.count;
    next_count = count + end - begin;
    auto const load = [&](auto columns, CUtensorMap const& map, uint64_t* full, TMA::CacheHintSm90 hint, auto* buffer,
                          int rows, int row, int head) {
      load_tile<decltype(columns)>(map, full, hint, buffer, rows, row, head, tile.batch);
    };
    auto const publish_next = [&] {
      if constexpr (kEarly) publish_tile(tile_number + 1, next_count);
    };
    // Once the consumers are sure to have finished the tile before this one: to wait for them would delay loads.
    int const ahead = min(kTilesAhead, end - begin - 2);
    load_row_tile<Traits>(args, smem, tile_number, count, tile, begin, end, load, ahead, publish_next);
    if (ahead < 0) publish_next();
  }
}

// Sequences read at run time: schedule_sequences publishes the tiles.
template <class Traits, class Args>
CUTE_DEVICE void sequence_producer(Args const& args, typename Traits::SharedStorage& smem) {
#pragma unroll 1
  for (int tile_number = 0;; ++tile_number) {
    smem.tile_pipeline.wait_full(at_step(tile_number));  // the scheduler has written the tile
    SequenceTile const& tile = smem.tile[tile_number & 1];
    if (tile.m_block < 0) break;
    auto const load = [&](auto columns, CUtensorMap const& map, uint64_t* full, TMA::CacheHintSm90 hint, auto* buffer,
                          int rows, int row, int head) {
      bool const queries = &map == &args.q;
      Sequence const& sequence = tile.sequence;
      SequenceOrigin const origin =
          sequence_origin(args.params, tile, queries ? sequence.first_row : sequence.first_key,
                          queries ? sequence.len_q : sequence.len_k);
      load_tile<decltype(columns)>(map, full, hint, buffer, rows, row, head, origin);
    };
    auto const prepare_next = [&] { smem.next_tile.publish({0, tile_number & 1}); };
    if (tile.keys.end - tile.keys.begin <= kTilesAhead) prepare_next();
    load_row_tile<Traits>(args, smem, tile_number, tile.keys.count, tile, tile.keys.begin, tile.keys.end, load,
                          kTilesAhead,
                          prepare_next);
    smem.tile_pipeline.arrive_empty(at_step(tile_number));  // the scheduler may overwrite the tile
  }
}

}  // namespace flash_cute::sm90::forward
