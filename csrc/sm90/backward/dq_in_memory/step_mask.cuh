// The mask of a step, a row tile at a key tile, for the consumers. `task()`: the task, in shared memory.
#pragma once

#include "core/mask.cuh"
#include "sm90/backward/common/place.cuh"
#include "sm90/backward/common/scores.cuh"
#include "sm90/backward/common/tile_columns.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

// By the band and the end of the keys. Where they are in shared memory, they are read again at each use.
template <class Traits, class ReadTask>
struct BandOfStep {
  BwdParams const& params;
  ReadTask const& task;
  TileRange const& range;  // of the key tile
  int n_block;
  int m_block;

  CUTE_DEVICE bool is_needed() const { return range.needs_mask(m_block); }

  // The tile's first row minus its first column.
  CUTE_DEVICE int offset() const { return m_block * Traits::kBlockM - n_block * Traits::kBlockN; }

  template <class Scores, class Coords, class Coords0>
  CUTE_DEVICE void apply(Scores& scores,             // (keys, rows)
                         Coords const& tScS,         // (keys, rows) -> (key, row)
                         Coords0 const& tScS_0) const {  // the same of thread 0, static
    apply_mask_transposed(scores, tScS, tScS_0, lengths_of(params, task()), m_block * Traits::kBlockM,
                          n_block * Traits::kBlockN);
  }
};

// By intervals or bits. The producer has told the step's row tile.
template <class Traits, class ReadTask>
struct ColumnsOfStep {
  BwdParams const& params;
  ReadTask const& task;
  int n_block;
  RowVisit const volatile& visit;
  bool masked = uniform(visit.masked) != 0;

  CUTE_DEVICE bool is_needed() const { return masked; }

  CUTE_DEVICE int offset() const { return visit.m_block * Traits::kBlockM - n_block * Traits::kBlockN; }

  template <class Scores, class Coords, class Coords0>
  CUTE_DEVICE void apply(Scores& scores,             // (keys, rows)
                         Coords const& tScS,         // (keys, rows) -> (key, row)
                         Coords0 const& tScS_0) const {  // the same of thread 0, static
    int const m_block = visit.m_block;
    TileColumns const columns =
        TileColumns::of_rows<Traits::kBlockM>(params, task().columns, task().second_columns, m_block);
    apply_columns_transposed(scores, tScS, tScS_0, columns, m_block * Traits::kBlockM);
  }
};

}  // namespace flash_cute::sm90::backward::dq_in_memory
