// The work of a CTA where sequences are read at run time: a key tile of a sequence, and the row tiles that visit it.
// One thread finds it in the lists of tiles (SequenceTiles) and leaves it in shared memory, read at each use.
#pragma once

#include "core/mask.cuh"
#include "core/score.cuh"
#include "core/sequence_tiles.cuh"
#include "task.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

struct SequenceTask {
  void const* q;       // row 0 of the sequence, query head 0
  void const* dout;    // the same of dO
  Sequence sequence;
  TileRange range;     // of row tiles; empty: dK and dV are 0
  int n_block;         // in the sequence; -1: the CTA has no key tile
  int head_kv;
  int index;           // of the sequence
  int keys;            // of dk and dv that the sequence has; those from len_k on are not used, and are 0
  int first_row_tile;  // among those of a head, see SequenceTiles
  int zero;            // 0, see thread_again

  // The thread's index. What depends on the special register alone ptxas moves out of the loop over row tiles, and the
  // kernels then spill; what depends on shared memory stays where it is.
  CUTE_DEVICE int thread_again() const { return fresh_thread_index() + zero; }

  // The number of a row tile among those of all heads: the index of its statistics, its sums and its semaphore.
  CUTE_DEVICE int64_t number(BwdParams const& params, RowTile const& row_tile) const {
    return int64_t{row_tile.head} * params.m_blocks + first_row_tile + row_tile.m_block;
  }

  // Row tiles are visited from the last to the first of each query head, and all of a head before those of the next.
  CUTE_DEVICE RowTile first(BwdParams const& params) const { return {head_kv * params.heads_per_kv, range.end - 1}; }
  CUTE_DEVICE bool contains(BwdParams const& params, RowTile const& row_tile) const {
    return static_cast<unsigned>(row_tile.head - head_kv * params.heads_per_kv) <
           static_cast<unsigned>(params.heads_per_kv);
  }
  CUTE_DEVICE RowTile next(RowTile const& row_tile) const {
    if (row_tile.m_block == range.begin) return {row_tile.head + 1, range.end - 1};
    return {row_tile.head, row_tile.m_block - 1};
  }
  CUTE_DEVICE RowTile previous(RowTile const& row_tile) const {
    if (row_tile.m_block == range.end - 1) return {row_tile.head - 1, range.begin};
    return {row_tile.head, row_tile.m_block + 1};
  }
};

// How many row tiles lie between a key tile of a head and the next one in launch order, so that what the heads between
// them read stays in L2; in the deterministic mode also so that the next key tile's turn has come when it begins.
template <int kRowTileBytes>
CUTE_DEVICE int heads_distance(bool deterministic, int n_blocks) {
  constexpr int kMiB = 1 << 20;
  return deterministic ? max(48 * kMiB / kRowTileBytes, 8 * n_blocks) : 16 * kMiB / kRowTileBytes;
}

// In the deterministic mode a CTA waits for key tiles of the same head and sequence with lower numbers. They have lower
// ranks, and a CTA draws its rank when it begins to run: their CTAs run already, or have ended.
template <class Traits>
CUTE_DEVICE void find_task(BwdParams const& params, SequenceTask& task) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  if (threadIdx.x == 0) {
    int const rank = params.deterministic ? atomicAdd(params.counters + DqQueue::kTicket, 1) : blockIdx.x;
    constexpr int kRowTileBytes = 8 * kBlockM * Traits::kHeadDim;  // of Q and dO, and the sums of dQ
    // The rows of a key tile are those of all query heads of its group.
    auto const distance = [&](int n_blocks) {
      return heads_distance<kRowTileBytes>(params.deterministic, n_blocks) / params.heads_per_kv;
    };
    task.n_block = -1;
    if (int const index = sequence_of_rank(params, rank); index >= 0) {
      SequenceRecord const& record = params.tiles.records[index];
      Sequence const sequence = record.sequence;
      ListedKeyTile const listed = listed_key_tile<kBlockM, kBlockN>(params, record, rank, distance);
      TileRange range = row_range<kBlockM, kBlockN>(sequence, listed.n_block);
      if (listed.n_block * kBlockN >= sequence.len_k) range.end = range.begin;  // keys that are not used
      auto const row_0 = [&](void const* base, Strides const& strides) -> void const* {
        constexpr int kHead = 0;
        return static_cast<typename Traits::Element const*>(base) +
               sequence_offset(params, strides, index, sequence.first_row, kHead);
      };
      task = {.q = row_0(params.q, params.q_strides),
              .dout = row_0(params.dout, params.dout_strides),
              .sequence = sequence,
              .range = range,
              .n_block = listed.n_block,
              .head_kv = listed.head_kv,
              .index = index,
              .keys = record.keys,
              .first_row_tile = record.first_row_tile,
              .zero = 0};
    }
  }
  __syncthreads();  // thread 0 has written the task
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
