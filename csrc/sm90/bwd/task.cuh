// The work items of the Hopper backward.
#pragma once

#include <climits>

#include "../../core/mask.cuh"
#include "../../core/sequence_tiles.cuh"
#include "../sequence_map.cuh"
#include "../warpgroup.cuh"
#include "args.cuh"
#include "order.h"

namespace flash_cute::sm90::bwd {

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
    if (tile.last_row_tile < 0) {
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

// A unit of work: a key tile, and a share of dQ's conversion: row tiles of a head whose sums are complete by then.
struct Task : KeyTile {
  int parts;     // parts of the key tile by other CTAs, which this one merges; -1: this task is a part
  int range;     // of the split tiles, if the key tile is split
  int split;     // index of the key tile among the split ones
  bool more;     // the range begins the next split tile too: that is the next task
  int dq_head;   // among the KV heads of all batches
  int dq_begin;  // the share is [dq_begin, dq_end) of all row tiles; -1: there are no more tasks
  int dq_end;

  // The task of ticket `index`. The order of key tiles: tile 0 of all heads of a group, then their tile 1, ..., so that
  // CTAs that read the same Q and dO run at about the same time, and with a causal mask the longest come first. CTAs
  // that wait for each other's dQ adds are far enough apart to hide the latency from one to the next. The whole tiles
  // are followed by the ranges of the split ones, the last range first, since a range waits for parts of the ranges
  // after it. The shares of dQ have the order of the tiles, `dq_lag` tasks later. `begin` must be set.
  template <class Traits>
  CUTE_DEVICE static void make(KernelArgs const& args, int index, Task volatile& task) {
    TileSplit const& split = args.params.split;
    int const first_range = args.params.task_order.tiles - split.tiles;
    task.n_block = -1;
    task.end = task.begin;
    task.parts = 0;
    task.more = false;
    if (index < first_range) {
      OrderEntry const keys(args, index);
      if (keys.number < args.params.n_blocks) KeyTile::make<Traits>(args, keys.head, keys.number, task);
    } else if (int const range = first_range + split.ranges - 1 - index; range >= 0) {
      make_part<Traits>(args, range, split.range_begin(range) / split.steps, task);
    }
    OrderEntry const share(args, index - args.params.task_order.dq_lag);
    int const row_tiles = args.params.m_blocks * args.params.heads_per_kv;
    task.dq_head = share.head;
    task.dq_begin = share.head * row_tiles + min(row_tiles, share.number * args.params.task_order.dq_share);
    task.dq_end = share.head * row_tiles + min(row_tiles, (share.number + 1) * args.params.task_order.dq_share);
  }

  // The next split tile of the same range. The task before has the ticket's share of dQ.
  template <class Traits>
  CUTE_DEVICE static void make_second(KernelArgs const& args, Task const volatile& before, Task volatile& task) {
    task.dq_begin = 0;
    task.dq_end = 0;
    make_part<Traits>(args, before.range, before.split + 1, task);
  }

 private:
  // The steps that a range has of split key tile number `tile`.
  template <class Traits>
  CUTE_DEVICE static void make_part(KernelArgs const& args, int range, int tile, Task volatile& task) {
    TileSplit const& split = args.params.split;
    OrderEntry const keys(args, args.params.task_order.tiles - split.tiles + tile);
    KeyTile::make<Traits>(args, keys.head, keys.number, task);
    int const begin = max(split.range_begin(range) - tile * split.steps, 0);
    int const end = split.range_begin(range + 1) - tile * split.steps;
    task.first.m_block = args.params.m_blocks - 1 - begin / args.params.heads_per_kv;
    task.first.head = begin % args.params.heads_per_kv;
    task.end = task.begin + min(end, split.steps) - begin;
    task.parts = begin > 0 ? -1 : split.parts(tile, range);
    task.range = range;
    task.split = tile;
    task.more = end > split.steps;
  }

  // The KV head of an index in the order, and the number of the tile (or share) in that head.
  struct OrderEntry {
    static constexpr int kNone = 1 << 27;  // more than the tiles or shares of any head
    static_assert((int64_t{kNone} + 1) * kMaxDqShare <= INT_MAX);

    int head = 0;
    int number = kNone;

    CUTE_DEVICE OrderEntry(KernelArgs const& args, int index) {
      TaskOrder const& order = args.params.task_order;
      if (unsigned(index) >= unsigned(order.tiles)) return;
      int const heads_of_larger = order.larger_groups * (order.interleaved_heads + 1);
      bool const larger = index < heads_of_larger * order.tasks_per_head;
      int const first = larger ? 0 : heads_of_larger, heads = order.interleaved_heads + larger;
      int const group = (index - first * order.tasks_per_head) / (heads * order.tasks_per_head);
      int const rank = (index - first * order.tasks_per_head) % (heads * order.tasks_per_head);
      head = first + group * heads + rank % heads;
      number = rank / heads;
    }
  };
};

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

// Row tiles of a sequence and KV head whose sums of dQ are complete: those of its first query head, then of the next.
struct alignas(16) DqChunk {
  Sequence sequence;
  int head_kv;
  int batch;           // the sequence's index
  int first_row_tile;  // among those of a head
  int row_tiles;       // of the sequence
};

// A unit of work: a key tile, or none, and the conversion of a chunk.
struct SequenceTask : SequenceKeyTile {
  int dq_begin;  // the row tiles [dq_begin, dq_end) of the sequence and KV head; -1: there are no more tasks
  int dq_end;
  int slot;      // the scheduler's: see TakenChunk
  DqChunk chunk;
};

}  // namespace flash_cute::sm90::bwd
