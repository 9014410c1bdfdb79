// The producers: one thread loads the CTA's columns of the cluster's tile once, and of the other side's tiles as far
// ahead of the consumers as there are stages.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "traits.cuh"

namespace flash_cute::sm90::bwd_large {

// The clusters of a head read the same tiles at the same time, so that each load would wait for memory as long as the
// first. Each of them prefetches one box per operand to L2, this many steps before it loads it.
constexpr int kStepsAhead = 2;

// Loads 64 rows of the CTA's columns, rows that the sequence does not have and columns behind the last one as zeros.
template <class Traits>
CUTE_DEVICE void load_tile(CUtensorMap const& map, uint64_t* full, TMA::CacheHintSm90 hint,
                           typename Traits::Element* buffer, int row, int head, SequenceOrigin const& origin) {
  CUTE_UNROLL
  for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
    SM90_TMA_LOAD_5D::copy(&map, full, static_cast<uint64_t>(hint), buffer + chunk * kTileRows * Traits::kChunk,
                           first_column_of_cta<Traits>() + chunk * Traits::kChunk, origin.row + row, head, origin.last,
                           origin.back);
  }
}
template <class Traits>
CUTE_DEVICE void prefetch_chunk(CUtensorMap const& map, int chunk, int row, int head, SequenceOrigin const& origin) {
  SM90_TMA_LOAD_5D::PREFETCH::copy(&map, first_column_of_cta<Traits>() + chunk * Traits::kChunk, origin.row + row, head,
                                   origin.last, origin.back);
}

template <class Traits>
constexpr uint32_t kTileBytes = Traits::kTileElements * sizeof(typename Traits::Element);

// Of dK and dV: K and V once, Q and dO with their statistics in each step.
template <class Traits>
CUTE_DEVICE void load_keys_and_rows(KernelArgs const& args, typename Traits::KeysStorage& smem) {
  constexpr uint32_t kStatBytes = kTileRows * sizeof(float);
  BwdParams const& params = args.params;
  KeyTile const volatile& tile = smem.tile;
  SequenceOrigin const rows = origin_of_rows(params, smem.tile), keys = origin_of_keys(params, smem.tile);
  int const steps = params.group * (tile.row_tiles.end - tile.row_tiles.begin);
  auto const load_once = [&](CUtensorMap const& map, Pipeline<1>& pipeline, typename Traits::Element* buffer) {
    load_tile<Traits>(map, pipeline.expect({}, kTileBytes<Traits>), TMA::CacheHintSm90::EVICT_FIRST, buffer,
                      tile.n_block * kTileRows, tile.head_kv, keys);
  };
  RowTile row_tile{tile.first.m_block, tile.first.head}, later = row_tile;
  CUTE_UNROLL
  for (int i = 0; i < kStepsAhead; ++i) later.advance(params.group, tile);
  PipelineState<Traits::kStagesOfRows> state;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    int const head = tile.head_kv * params.group + row_tile.head;
    if (i + kStepsAhead < steps) {
      int const chunk = tile.n_block % Traits::kChunks, later_head = tile.head_kv * params.group + later.head;
      prefetch_chunk<Traits>(args.q, chunk, later.m_block * kTileRows, later_head, rows);
      prefetch_chunk<Traits>(args.dout, chunk, later.m_block * kTileRows, later_head, rows);
    }
    auto const load_rows = [&](CUtensorMap const& map, auto& pipeline, auto& buffers, float const* statistic,
                               auto& statistics) {
      pipeline.wait_empty(state);  // both warpgroups have read what was in this stage
      uint64_t* const full = pipeline.expect(state, kTileBytes<Traits> + kStatBytes);
      load_tile<Traits>(map, full, TMA::CacheHintSm90::EVICT_LAST, buffers[state.stage], row_tile.m_block * kTileRows,
                        head, rows);
      int64_t const first = first_statistic(params, head, tile.first_row_tile, row_tile.m_block);
      SM90_BULK_COPY_G2S::copy(statistic + first, full, statistics[state.stage], kStatBytes);
    };
    load_rows(args.q, smem.q_pipeline, smem.q, params.lse_log2, smem.lse_log2);
    if (i == 0) load_once(args.k, smem.k_pipeline, smem.k);
    load_rows(args.dout, smem.dout_pipeline, smem.dout, params.delta, smem.delta);
    if (i == 0) load_once(args.v, smem.v_pipeline, smem.v);
    state.advance();
    row_tile.advance(params.group, tile);
    later.advance(params.group, tile);
  }
}

// Of dQ: Q and dO once, K and V in each step, from the last key tile to the first.
template <class Traits>
CUTE_DEVICE void load_rows_and_keys(KernelArgs const& args, typename Traits::QueriesStorage& smem) {
  BwdParams const& params = args.params;
  RowTileTask const volatile& tile = smem.tile;
  SequenceOrigin const rows = origin_of_rows(params, smem.tile), keys = origin_of_keys(params, smem.tile);
  int const begin = tile.key_tiles.begin, end = tile.key_tiles.end, head_kv = tile.head / params.group;
  if (begin == end) return;
  uint64_t* const full = smem.rows_pipeline.expect({}, 2 * kTileBytes<Traits>);
  auto const load_once = [&](CUtensorMap const& map, typename Traits::Element* buffer) {
    load_tile<Traits>(map, full, TMA::CacheHintSm90::EVICT_FIRST, buffer, tile.m_block * kTileRows, tile.head, rows);
  };
  load_once(args.q, smem.q);
  PipelineState<Traits::kStagesOfKeys> k_state;
  PipelineState<Traits::kStagesOfValues> v_state;
#pragma unroll 1
  for (int n = end - 1; n >= begin; --n) {
    if (n - kStepsAhead >= begin) {
      int const chunk = tile.m_block % Traits::kChunks, row = (n - kStepsAhead) * kTileRows;
      prefetch_chunk<Traits>(args.k, chunk, row, head_kv, keys);
      prefetch_chunk<Traits>(args.v, chunk, row, head_kv, keys);
    }
    auto const load = [&](CUtensorMap const& map, auto& pipeline, auto& state, auto& buffers) {
      pipeline.wait_empty(state);  // what was in this stage has been read
      load_tile<Traits>(map, pipeline.expect(state, kTileBytes<Traits>), TMA::CacheHintSm90::EVICT_LAST,
                        buffers[state.stage], n * kTileRows, head_kv, keys);
      state.advance();
    };
    load(args.k, smem.k_pipeline, k_state, smem.k);
    if (n == end - 1) load_once(args.dout, smem.dout);
    load(args.v, smem.v_pipeline, v_state, smem.v);
  }
}

}  // namespace flash_cute::sm90::bwd_large
