// Key tiles and the row tiles that visit them.
#pragma once

#include <type_traits>

#include "core/mask.cuh"
#include "core/sequence_tiles.cuh"
#include "sm90/common/warpgroup.cuh"
#include "args.cuh"
#include "heads_distance.h"
#include "masked_rows.cuh"

namespace flash_cute::sm90::backward {

// A row tile among those that a key tile visits: first the last row tile of each query head of the group, then the one
// before it, and so on. With a causal mask all key tiles of a head thus begin with the same rows and advance together,
// and none waits while another works on row tiles that only the other visits.
//
// With a narrow window all key tiles have as many rows, and visit them one query head after the other: the rows that
// the CTAs are spread over at a time, of one query head instead of all of the group, fit in L2.
struct RowTile {
  int m_block;
  int head = 0;  // of the group

  // To the next one of as many query heads in alternation.
  CUTE_DEVICE void advance(int heads) {
    if (++head == heads) {
      head = 0;
      --m_block;
    }
  }

  // To the key tile's next row tile.
  template <class Tile>
  CUTE_DEVICE void advance(int group, Tile& tile) {
    if constexpr (std::is_base_of_v<MaskedRows, Tile>) {
      if (++head < group) return;
      head = 0;
      m_block = MaskedRows::last_row_tile_below(tile, m_block);
    } else if (tile.last_row_tile < 0) {
      advance(group);
    } else if (m_block-- == tile.last_row_tile) {
      m_block = tile.first.m_block;
      ++head;
    }
  }
};

// Copies what a kernel before has written to shared memory, 16 bytes at a time.
template <class T>
CUTE_DEVICE void copy_to_smem(T const& from, T& to) {
  static_assert(sizeof(T) % sizeof(int4) == 0);
  CUTE_UNROLL
  for (int i = 0; i < int(sizeof(T) / sizeof(int4)); ++i) {
    reinterpret_cast<int4*>(&to)[i] = reinterpret_cast<int4 const*>(&from)[i];
  }
}

// A key tile, or one CTA's share of a split tile. Kept in shared memory; warps short of registers reload it at each
// use.
struct KeyTile {
  int n_block;     // -1: no key tile
  int head_kv;
  int batch;
  RowTile first;      // its first row tile
  int last_row_tile;  // where a query head's row tiles end if these follow each other; -1: the heads alternate
  int begin;       // its row tiles are the steps [begin, end) of this CTA; the step number selects the pipeline stage
  int end;
  int keys_phase;  // of the barriers of K and V

  // The whole key tile, with all row tiles that visit it. `begin` must be set. `head`: among the KV heads of all
  // batches.
  template <class Traits>
  CUTE_DEVICE static void make(KernelArgs const& args, int head, int n_block, KeyTile volatile& tile) {
    TileRange const range = row_range<Traits::kBlockM, Traits::kBlockN>(args.params, n_block);
    tile.n_block = n_block;
    tile.head_kv = head % args.params.heads_kv;
    tile.batch = head / args.params.heads_kv;
    tile.first.m_block = range.end - 1;
    tile.first.head = 0;
    tile.last_row_tile = args.params.band.is_window(args.params.len_q) ? range.begin : -1;
    tile.end = tile.begin + args.params.heads_per_kv * (range.end - range.begin);
  }
};

// A key tile in shared memory, with values that the compiler knows to be equal in all lanes.
CUTE_DEVICE KeyTile read_uniform(KeyTile const volatile& tile) {
  KeyTile result;
  result.n_block = uniform(tile.n_block);
  result.head_kv = uniform(tile.head_kv);
  result.batch = uniform(tile.batch);
  result.first.m_block = uniform(tile.first.m_block);
  result.first.head = uniform(tile.first.head);
  result.last_row_tile = uniform(tile.last_row_tile);
  result.begin = uniform(tile.begin);
  result.end = uniform(tile.end);
  result.keys_phase = uniform(tile.keys_phase);
  return result;
}

// A key tile of a sequence that is read at run time. `batch` is the sequence's index.
struct SequenceKeyTile : KeyTile, SequenceRecord {
  // The key tile of a rank in the order of processing; false if there is none. `begin` must be set.
  template <class Traits>
  CUTE_DEVICE static bool make(KernelArgs const& args, int rank, SequenceKeyTile& tile) {
    BwdParams const& params = args.params;
    constexpr int kBlockN = Traits::kBlockN;
    int const index = sequence_of_rank(params, rank);
    if (index < 0) return false;
    copy_to_smem<SequenceRecord>(params.tiles.records[index], tile);
    // Step by step through shared memory: the thread has few registers.
    SequenceKeyTile volatile& there = tile;
    there.batch = index;
    auto const distance = [&](int n_blocks) { return heads_distance(/*masked=*/true, params.deterministic, n_blocks); };
    ListedKeyTile const listed = listed_key_tile<Traits::kListedRows, kBlockN>(params, there, rank, distance);
    there.n_block = listed.n_block;
    there.head_kv = listed.head_kv;
    Sequence const sequence{.len_q = there.sequence.len_q,
                            .len_k = there.sequence.len_k,
                            .band = {.lower = there.sequence.band.lower, .upper = there.sequence.band.upper}};
    TileRange const range = row_range<Traits::kBlockM, kBlockN>(sequence, there.n_block);
    bool const used = there.n_block * kBlockN < sequence.len_k;
    there.first.m_block = range.end - 1;
    there.first.head = 0;
    there.last_row_tile = sequence.band.is_window(sequence.len_q) ? range.begin : -1;
    there.end = there.begin + (used ? params.heads_per_kv * (range.end - range.begin) : 0);
    return true;
  }
};

}  // namespace flash_cute::sm90::backward
