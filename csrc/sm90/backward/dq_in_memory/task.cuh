// The work items of this backward.
#pragma once

#include <climits>

#include "core/mask.cuh"
#include "core/sequence_tiles.cuh"
#include "sm90/common/warpgroup.cuh"
#include "sm90/backward/common/key_tile.cuh"
#include "order.h"

namespace flash_cute::sm90::backward::dq_in_memory {

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

// The same where the batch has a mask.
struct MaskedTask : Task, MaskedRows {
  template <class Traits>
  CUTE_DEVICE static void make(KernelArgs const& args, int index, MaskedTask volatile& task) {
    Task::make<Traits>(args, index, task);
    if (task.n_block >= 0) MaskedRows::find<Traits>(args.params, task);
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

}  // namespace flash_cute::sm90::backward::dq_in_memory
