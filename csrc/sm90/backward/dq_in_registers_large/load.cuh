// The producers up to head dim 320: one thread loads the CTA's tile once, and the other tiles as far ahead of the
// consumers as there are stages.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "traits.cuh"

namespace flash_cute::sm90::backward::dq_in_registers_large {

// The CTAs, or clusters, of a head read the same tiles at the same time, so that each load would wait for memory as
// long as the first. Each of them prefetches one box per operand to L2, this many steps before it loads it.
constexpr int kStepsAhead = 2;

// Loads 64 rows, those that the sequence does not have and columns behind the last one as zeros.
template <class Traits>
CUTE_DEVICE void load_tile(CUtensorMap const& map, uint64_t* full, TMA::CacheHintSm90 hint,
                           typename Traits::Element* buffer, int row, int head, SequenceOrigin const& origin) {
  CUTE_UNROLL
  for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
    SM90_TMA_LOAD_5D::copy(&map, full, static_cast<uint64_t>(hint), buffer + chunk * kTileRows * Traits::kChunk,
                           chunk * Traits::kChunk, origin.row + row, head, origin.last, origin.back);
  }
}
// The same of a unit of chunks.
template <class Traits, int kUnit>
CUTE_DEVICE void load_unit(CUtensorMap const& map, uint64_t* full, typename Traits::Element* buffer, int row, int head,
                           SequenceOrigin const& origin) {
  CUTE_UNROLL
  for (int i = 0; i < Traits::chunks_of_unit(kUnit); ++i) {
    int const chunk = Traits::first_chunk(kUnit) + i;
    SM90_TMA_LOAD_5D::copy(&map, full, static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST),
                           buffer + chunk * kTileRows * Traits::kChunk, chunk * Traits::kChunk, origin.row + row, head,
                           origin.last, origin.back);
  }
}
template <class Traits>
CUTE_DEVICE void prefetch_chunk(CUtensorMap const& map, int chunk, int row, int head, SequenceOrigin const& origin) {
  SM90_TMA_LOAD_5D::PREFETCH::copy(&map, chunk * Traits::kChunk, origin.row + row, head, origin.last, origin.back);
}

template <class Traits>
constexpr uint32_t kTileBytes = Traits::kTileElements * sizeof(typename Traits::Element);
template <class Traits, int kUnit>
constexpr uint32_t kUnitBytes = kTileBytes<Traits> / Traits::kChunks * Traits::chunks_of_unit(kUnit);

// Of dK and dV: K and V once, Q and dO with their statistics in each step.
template <class Traits>
CUTE_DEVICE void load_keys_and_rows(KernelArgs const& args, typename Traits::KeysStorage& smem) {
  constexpr uint32_t kStatBytes = kTileRows * sizeof(float);
  BwdParams const& params = args.params;
  KeyTile const volatile& tile = smem.tile;
  SequenceOrigin const rows = origin_of_rows(params, smem.tile), keys = origin_of_keys(params, smem.tile);
  int const steps = params.heads_per_kv * (tile.row_tiles.end - tile.row_tiles.begin);
  auto const load_once = [&](CUtensorMap const& map, Pipeline<1>& pipeline, typename Traits::Element* buffer) {
    load_tile<Traits>(map, pipeline.expect({}, kTileBytes<Traits>), TMA::CacheHintSm90::EVICT_FIRST, buffer,
                      tile.n_block * kTileRows, tile.head_kv, keys);
  };
  RowTile row_tile{tile.first.m_block, tile.first.head}, later = row_tile;
  CUTE_UNROLL
  for (int i = 0; i < kStepsAhead; ++i) later.advance(params.heads_per_kv, tile);
  PipelineState<kStagesOfQ> q_state;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    int const head = tile.head_kv * params.heads_per_kv + row_tile.head;
    if (i + kStepsAhead < steps) {
      int const chunk = tile.n_block % Traits::kChunks, later_head = tile.head_kv * params.heads_per_kv + later.head;
      prefetch_chunk<Traits>(args.q, chunk, later.m_block * kTileRows, later_head, rows);
      prefetch_chunk<Traits>(args.dout, chunk, later.m_block * kTileRows, later_head, rows);
    }
    int const row = row_tile.m_block * kTileRows;
    int64_t const first = first_statistic(params, head, tile.first_row_tile, row_tile.m_block);
    smem.q_pipeline.wait_empty(q_state);  // both warpgroups have read what was in this stage
    uint64_t* full = smem.q_pipeline.expect(q_state, kTileBytes<Traits> + kStatBytes);
    load_tile<Traits>(args.q, full, TMA::CacheHintSm90::EVICT_LAST, smem.q[q_state.stage], row, head, rows);
    SM90_BULK_COPY_G2S::copy(params.lse_log2 + first, full, smem.lse_log2[q_state.stage], kStatBytes);
    q_state.advance();
    if (i == 0) load_once(args.k, smem.k_pipeline, smem.k);
    smem.dout_pipeline.wait_empty({0, i & 1});  // both warpgroups have read the first unit of the step before
    full = smem.dout_pipeline.expect({0, i & 1}, kUnitBytes<Traits, 0> + kStatBytes);
    load_unit<Traits, 0>(args.dout, full, smem.dout, row, head, rows);
    SM90_BULK_COPY_G2S::copy(params.delta + first, full, smem.delta, kStatBytes);
    smem.dout_pipeline.wait_empty({1, i & 1});  // the second one
    load_unit<Traits, 1>(args.dout, smem.dout_pipeline.expect({1, i & 1}, kUnitBytes<Traits, 1>), smem.dout, row, head,
                         rows);
    if (i == 0) load_once(args.v, smem.v_pipeline, smem.v);
    row_tile.advance(params.heads_per_kv, tile);
    later.advance(params.heads_per_kv, tile);
  }
}

// Of dQ: Q and dO once, K and V in each step, from the last key tile to the first.
template <class Traits>
CUTE_DEVICE void load_rows_and_keys(KernelArgs const& args, typename Traits::QueriesStorage& smem) {
  BwdParams const& params = args.params;
  RowTileTask const volatile& tile = smem.tile;
  SequenceOrigin const rows = origin_of_rows(params, smem.tile), keys = origin_of_keys(params, smem.tile);
  int const begin = tile.key_tiles.begin, end = tile.key_tiles.end, head_kv = tile.head / params.heads_per_kv;
  if (begin == end) return;
  uint64_t* const full = smem.rows_pipeline.expect({}, 2 * kTileBytes<Traits>);
  auto const load_once = [&](CUtensorMap const& map, typename Traits::Element* buffer) {
    load_tile<Traits>(map, full, TMA::CacheHintSm90::EVICT_FIRST, buffer, tile.m_block * kTileRows, tile.head, rows);
  };
  load_once(args.q, smem.q);
  PipelineState<kStagesOfKeys> k_state;
#pragma unroll 1
  for (int n = end - 1; n >= begin; --n) {
    if (n - kStepsAhead >= begin) {
      int const chunk = tile.m_block % Traits::kChunks, row = (n - kStepsAhead) * kTileRows;
      prefetch_chunk<Traits>(args.k, chunk, row, head_kv, keys);
      prefetch_chunk<Traits>(args.v, chunk, row, head_kv, keys);
    }
    smem.k_pipeline.wait_empty(k_state);  // both warpgroups have read what was in this stage
    load_tile<Traits>(args.k, smem.k_pipeline.expect(k_state, kTileBytes<Traits>), TMA::CacheHintSm90::EVICT_LAST,
                      smem.k[k_state.stage], n * kTileRows, head_kv, keys);
    k_state.advance();
    if (n == end - 1) load_once(args.dout, smem.dout);
    int const phase = (end - 1 - n) & 1;
    smem.v_pipeline.wait_empty({0, phase});  // dP of the step before has read the first unit
    load_unit<Traits, 0>(args.v, smem.v_pipeline.expect({0, phase}, kUnitBytes<Traits, 0>), smem.v, n * kTileRows,
                         head_kv, keys);
    smem.v_pipeline.wait_empty({1, phase});  // the second one
    load_unit<Traits, 1>(args.v, smem.v_pipeline.expect({1, phase}, kUnitBytes<Traits, 1>), smem.v, n * kTileRows,
                         head_kv, keys);
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
