// The work of a CTA of a batch with a mask: a key tile, and the row tiles that its lists name. One thread
// leaves it in shared memory, as that of a sequence, see sequence_task.cuh.
#pragma once

#include "core/mask_columns.cuh"
#include "core/tile_bits.cuh"
#include "sequence_task.cuh"
#include "task.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

struct MaskedTask {
  void const* q;     // row 0 of query head 0
  void const* dout;  // the same of dO
  uint32_t const* visited;       // the key tile's lists, of row tiles
  uint32_t const* whole;
  uint32_t const* visitors;      // the list of row tile 0, of key tiles
  RowBits const* columns;        // the first intervals of the tile's columns, or the bits of the first 64 rows
  Sequence sequence;             // the batch's rows and keys
  int n_block;
  int head_kv;
  int index;                     // of the batch
  int first_tile;                // the first row tile of a head that visits it, and the last; -1: none, dK and dV are 0
  int last_tile;
  int zero;                      // 0, see SequenceTask::thread_again

  CUTE_DEVICE int thread_again() const { return fresh_thread_index() + zero; }

  CUTE_DEVICE int64_t number(BwdParams const& params, RowTile const& row_tile) const {
    return row_tile.index(params, index);
  }

  // In the order of SequenceTask.
  CUTE_DEVICE RowTile first(BwdParams const& params) const { return {head_kv * params.heads_per_kv, last_tile}; }
  CUTE_DEVICE bool contains(BwdParams const& params, RowTile const& row_tile) const {
    return static_cast<unsigned>(row_tile.head - head_kv * params.heads_per_kv) <
           static_cast<unsigned>(params.heads_per_kv);
  }
  CUTE_DEVICE RowTile next(RowTile const& row_tile) const {
    if (row_tile.m_block == first_tile) return {row_tile.head + 1, last_tile};
    return {row_tile.head, last_set_before(visited, row_tile.m_block)};
  }
  CUTE_DEVICE RowTile previous(RowTile const& row_tile) const {
    if (row_tile.m_block == last_tile) return {row_tile.head - 1, first_tile};
    return {row_tile.head, first_set_from(visited, row_tile.m_block + 1)};
  }
};

// In the deterministic mode a CTA waits for key tiles of the same head with lower numbers, which have lower indices: as
// in find_task of sequences, their CTAs run already, or have ended.
template <class Traits>
CUTE_DEVICE void find_task(BwdParams const& params, MaskedTask& task) {
  if (threadIdx.x == 0) {
    KeyTile const tile(params, params.deterministic ? atomicAdd(params.counters, 1) : int(blockIdx.x));
    TileMask const& mask = params.mask;
    int64_t const list = tile.batch * mask.key_list_batch_stride + tile.head_kv * mask.key_list_head_stride +
                         int64_t{tile.n_block} * mask.of_keys.words;
    auto const row_0 = [&](void const* base, Strides const& strides) -> void const* {
      return static_cast<typename Traits::Element const*>(base) + tile.batch * strides.batch;
    };
    uint32_t const* const visited = mask.of_keys.visited + list;
    int const last = last_set_before(visited, params.m_blocks);
    task = {.q = row_0(params.q, params.q_strides),
            .dout = row_0(params.dout, params.dout_strides),
            .visited = visited,
            .whole = mask.of_keys.whole + list,
            .visitors = mask.of_rows.visited + tile.batch * mask.row_list_batch_stride +
                        tile.head_kv * mask.row_list_head_stride,
            .columns = columns_of_head(mask, tile.batch, tile.head_kv) + tile.n_block * Traits::kBlockN,
            .sequence = {.len_q = params.len_q,
                         .len_k = params.len_k,
                         .shift = params.sequences.shift,
                         .rows = params.len_q},
            .n_block = tile.n_block,
            .head_kv = tile.head_kv,
            .index = tile.batch,
            .first_tile = last < 0 ? -1 : first_set_from(visited, 0),
            .last_tile = last,
            .zero = 0};
  }
  __syncthreads();  // thread 0 has written the task
}

// The key tile that comes before the task's in the order in which key tiles add to a row tile; -1: none.
CUTE_DEVICE int visitor_before(BwdParams const& params, MaskedTask const& task, int m_block) {
  return last_set_before(task.visitors + int64_t{m_block} * params.mask.of_rows.words, task.n_block);
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
