// The backward's loads: one thread loads K and V of a key tile once, and Q, dO and their row statistics for every row
// tile of every query head, as far ahead of the consumers as there are stages.
#pragma once

#include <type_traits>

#include <cute/arch/copy_sm90_tma.hpp>

#include "place.cuh"
#include "sm90/common/load_tma.cuh"
#include "sm90/common/pipeline.cuh"

namespace flash_cute::sm90::backward {

// A statistic of rows: in the workspace, and its stages in shared memory.
struct StatBuffers {
  float const* rows;
  float* stages;
};

// The mask of a step for consumers that have no registers to find it themselves.
struct alignas(16) StepMask {
  int offset;   // the tile's first row minus its first column
  int columns;  // the tile's columns below len_k; -1: every row sees every column
  int lower;    // the band
  int upper;

  // (Rows past len_q need no mask: their lse_log2 is +inf, so that P = 0.)
  template <class Traits, class Tile>
  CUTE_DEVICE static void make(BwdParams const& params, Tile const volatile& tile, int m_block,
                               StepMask volatile& mask) {
    int const key = tile.n_block * Traits::kBlockN, offset = m_block * Traits::kBlockM - key;
    auto const write = [&](auto const& lengths) {
      int const columns = min(lengths.len_k - key, Traits::kBlockN);
      bool const crossed = crosses_band<Traits::kBlockM, Traits::kBlockN>(lengths, offset);
      mask.offset = offset;
      mask.columns = crossed || columns < Traits::kBlockN ? columns : -1;
      mask.lower = lengths.band.lower;
      mask.upper = lengths.band.upper;
    };
    write(lengths_of(params, tile));
  }
};

struct NoSignal {
  CUTE_DEVICE void operator()(int) const {}
};

// `before_step`: called with the number of each step before its loads.
template <class Traits, class SharedStorage, class Tile, class Signal = NoSignal>
CUTE_DEVICE void load_key_tile(KernelArgs const& args, SharedStorage& smem, Tile const volatile& tile,
                               Signal const& before_step = {}) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  constexpr uint32_t kStatBytes = kBlockM * sizeof(float);
  BwdParams const& params = args.params;
  auto load_keys = [&](auto columns, CUtensorMap const& map, Pipeline<1>& pipeline, Element* buffer) {
    using Columns = decltype(columns);
    constexpr uint32_t kBytes = kBlockN * Columns::kChunk * Columns::kChunks * sizeof(Element);
    PipelineState<1> const keys{0, tile.keys_phase};
    pipeline.wait_empty(keys);  // all consumer warps have finished their GEMMs with the last key tile's K or V
    load_tile<Columns>(map, pipeline.expect(keys, kBytes), TMA::CacheHintSm90::EVICT_FIRST, buffer, kBlockN,
                       tile.n_block * kBlockN, tile.head_kv, origin_of_keys(params, tile));
  };
  RowTile row_tile{tile.first.m_block, tile.first.head};
  bool first = true;
#pragma unroll 1
  for (int count = tile.begin; count < tile.end; ++count, row_tile.advance(args.params.heads_per_kv, tile)) {
    before_step(count);
    auto load_rows = [&](auto columns, CUtensorMap const& map, Pipeline<Traits::kStages>& pipeline, Element* buffer,
                         auto const&... stats) {
      using Columns = decltype(columns);
      constexpr uint32_t kElements = kBlockM * Columns::kChunk * Columns::kChunks;
      PipelineState<2> const state = at_step(count);
      pipeline.wait_empty(state);  // all consumer warps have finished dK += dS^T Q, or dV += P^T dO, of two steps ago
      if constexpr (Traits::kProducerMasks) {
        if constexpr (std::is_same_v<Columns, typename Traits::ColumnsQ>) {
          StepMask::make<Traits>(params, tile, row_tile.m_block, smem.masks[state.stage]);
        }
      }
      uint64_t* const full = pipeline.expect(state, kElements * sizeof(Element) + sizeof...(stats) * kStatBytes);
      int const head = tile.head_kv * args.params.heads_per_kv + row_tile.head;
      load_tile<Columns>(map, full, TMA::CacheHintSm90::EVICT_LAST, buffer + state.stage * kElements, kBlockM,
                         row_tile.m_block * kBlockM, head, origin_of_rows(params, tile));
      int64_t const index = row_tile_index<Traits>(params, tile, row_tile);
      (SM90_BULK_COPY_G2S::copy(stats.rows + index * kBlockM, full, stats.stages + state.stage * kBlockM, kStatBytes),
       ...);
    };
    typename Traits::ColumnsQ const q{};
    typename Traits::ColumnsK const k{};
    typename Traits::ColumnsV const v{};
    if constexpr (Traits::kVariant.reads_mask) {
      smem.q_pipeline.wait_empty(at_step(count));  // so that the step's place in the ring is free, see RowVisits
      RowVisit::make(tile, row_tile, smem.visits.at(count));
    }
    StatBuffers const lse_log2{params.lse_log2, smem.lse_log2[0]}, delta{params.delta, smem.delta[0]};
    if constexpr (Traits::kDeltaWithQ) {
      load_rows(q, args.q, smem.q_pipeline, smem.q[0], lse_log2, delta);
    } else {
      load_rows(q, args.q, smem.q_pipeline, smem.q[0], lse_log2);
    }
    if (first) load_keys(k, args.k, smem.k_pipeline, smem.k);
    if constexpr (Traits::kDeltaWithQ) {
      load_rows(v, args.dout, smem.dout_pipeline, smem.dout[0]);
    } else {
      load_rows(v, args.dout, smem.dout_pipeline, smem.dout[0], delta);
    }
    if (first) load_keys(v, args.v, smem.v_pipeline, smem.v);
    first = false;
  }
}

}  // namespace flash_cute::sm90::backward
