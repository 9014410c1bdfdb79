// The producers above head dim 320: one thread loads the CTA's columns of its side's operands, of the cluster's tile
// once and of the streamed tiles as far ahead of the products as the ring has room.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "load.cuh"
#include "side_traits.cuh"

namespace flash_cute::sm90::backward::dq_in_registers_large {

// Loads 64 rows of a unit of the CTA's columns, rows that the sequence does not have and columns behind the last one
// as zeros.
template <class Traits>
CUTE_DEVICE void load_side_unit(CUtensorMap const& map, uint64_t* full, TMA::CacheHintSm90 hint,
                                typename Traits::Element* buffer, int unit, int row, int head,
                                SequenceOrigin const& origin) {
  CUTE_UNROLL
  for (int column = 0; column < Traits::kUnitColumns; column += Traits::kChunk) {
    SM90_TMA_LOAD_5D::copy(&map, full, static_cast<uint64_t>(hint), buffer + kTileRows * column,
                           first_column_of_side<Traits>() + unit * Traits::kUnitColumns + column, origin.row + row,
                           head, origin.last, origin.back);
  }
}

// The cluster's own tile.
template <class Traits, class Storage>
CUTE_DEVICE void load_resident(CUtensorMap const& map, Storage& smem, int row, int head, SequenceOrigin const& origin) {
  uint64_t* const full = smem.resident_pipeline.expect({}, sizeof(smem.resident));
  CUTE_UNROLL
  for (int unit = 0; unit < Traits::kUnits; ++unit) {
    load_side_unit<Traits>(map, full, TMA::CacheHintSm90::EVICT_FIRST, smem.resident[unit], unit, row, head, origin);
  }
}

// The streamed tile of a step.
template <class Traits, class Storage>
CUTE_DEVICE void load_streamed(CUtensorMap const& map, Storage& smem, int step, int row, int head,
                               SequenceOrigin const& origin) {
#pragma unroll 1
  for (int i = 0; i < Traits::kUnits; ++i) {
    int const unit = Traits::unit_in_order(step, i);
    PipelineState<Traits::kStages * Traits::kUnits> const state{(step & 1) * Traits::kUnits + unit, (step >> 1) & 1};
    smem.stream_pipeline.wait_empty(state);  // the four warps that use the unit last have read it
    uint64_t* const full = smem.stream_pipeline.expect(state, sizeof(smem.stream[0]));
    load_side_unit<Traits>(map, full, TMA::CacheHintSm90::EVICT_LAST, smem.stream[state.stage], unit, row, head,
                           origin);
  }
}

// One of the boxes of a tile: the clusters of a head share the prefetches of a tile.
template <class Traits>
CUTE_DEVICE void prefetch_box(CUtensorMap const& map, int cluster, int row, int head, SequenceOrigin const& origin) {
  int const box = cluster % (Traits::kColumns / Traits::kChunk);
  SM90_TMA_LOAD_5D::PREFETCH::copy(&map, first_column_of_side<Traits>() + box * Traits::kChunk, origin.row + row, head,
                                   origin.last, origin.back);
}

// Of dK and dV: K and Q, or V and dO.
template <class Traits>
CUTE_DEVICE void load_keys_side(KernelArgs const& args, typename Traits::KeysStorage& smem) {
  BwdParams const& params = args.params;
  KeyTile const volatile& tile = smem.tile;
  SequenceOrigin const rows = origin_of_rows(params, smem.tile), keys = origin_of_keys(params, smem.tile);
  int const steps = params.heads_per_kv * (tile.row_tiles.end - tile.row_tiles.begin);
  if (steps == 0) return;
  CUtensorMap const& own = side() == kSideS ? args.k : args.v;
  CUtensorMap const& streamed = side() == kSideS ? args.q : args.dout;
  load_resident<Traits>(own, smem, tile.n_block * kTileRows, tile.head_kv, keys);
  RowTile row_tile{tile.first.m_block, tile.first.head}, later = row_tile;
  CUTE_UNROLL
  for (int i = 0; i < kStepsAhead; ++i) later.advance(params.heads_per_kv, tile);
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    int const first_head = tile.head_kv * params.heads_per_kv;
    if (i + kStepsAhead < steps) {
      prefetch_box<Traits>(streamed, tile.n_block, later.m_block * kTileRows, first_head + later.head, rows);
    }
    load_streamed<Traits>(streamed, smem, i, row_tile.m_block * kTileRows, first_head + row_tile.head, rows);
    row_tile.advance(params.heads_per_kv, tile);
    later.advance(params.heads_per_kv, tile);
  }
}

// Of dQ, from the last key tile to the first: Q and K, or dO and V.
template <class Traits>
CUTE_DEVICE void load_queries_side(KernelArgs const& args, typename Traits::QueriesStorage& smem) {
  BwdParams const& params = args.params;
  RowTileTask const volatile& tile = smem.tile;
  SequenceOrigin const rows = origin_of_rows(params, smem.tile), keys = origin_of_keys(params, smem.tile);
  int const begin = tile.key_tiles.begin, last = tile.key_tiles.end - 1, head_kv = tile.head / params.heads_per_kv;
  if (begin > last) return;
  CUtensorMap const& own = side() == kSideS ? args.q : args.dout;
  CUtensorMap const& streamed = side() == kSideS ? args.k : args.v;
  load_resident<Traits>(own, smem, tile.m_block * kTileRows, tile.head, rows);
#pragma unroll 1
  for (int n = last; n >= begin; --n) {
    if (n - kStepsAhead >= begin) {
      prefetch_box<Traits>(streamed, tile.m_block, (n - kStepsAhead) * kTileRows, head_kv, keys);
    }
    load_streamed<Traits>(streamed, smem, last - n, n * kTileRows, head_kv, keys);
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
