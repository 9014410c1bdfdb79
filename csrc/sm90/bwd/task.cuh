// What a CTA of the Hopper backward works on.
#pragma once

#include <climits>

#include "../../core/mask.cuh"
#include "args.cuh"

namespace flash_cute::sm90::bwd {

// A row tile among those that a key tile visits: the last one of each of the group's query heads comes first, then the one
// before it. So with a causal mask all key tiles of a head begin with the same rows and go on together, and none waits for
// another to store dQ of rows that itself has no key for.
struct RowTile {
  int m_block;
  int head = 0;  // of the group

  CUTE_DEVICE void advance(int group) {
    if (++head == group) {
      head = 0;
      --m_block;
    }
  }
};

// A key tile, or one CTA's share of a split tile. Kept in shared memory; warps short of registers reload it at each use.
struct KeyTile {
  int n_block;     // -1: none
  int head_kv;
  int batch;
  RowTile first;   // of its row tiles
  int begin;       // they are the steps [begin, end) of this CTA: the step number selects the pipeline stage
  int end;
  int keys_phase;  // of the buffers of K and V

  // All row tiles that visit the key tile; `begin` is set. `head`: of the KV heads of all batches.
  template <class Traits>
  CUTE_DEVICE static void make(KernelArgs const& args, int head, int n_block, KeyTile volatile& tile) {
    TileRange const range = row_range<Traits::kBlockM, Traits::kBlockN>(args.params, n_block);
    tile.n_block = n_block;
    tile.head_kv = head % args.params.heads_kv;
    tile.batch = head / args.params.heads_kv;
    tile.first.m_block = range.end - 1;
    tile.first.head = 0;
    tile.end = tile.begin + args.params.group * (range.end - range.begin);
  }
};

// What a CTA draws at once: a key tile, and dQ of some row tiles of a head whose sums are complete by then.
struct Task : KeyTile {
  int parts;     // of the key tile that other CTAs have, and this one merges; -1: this is such a part
  int range;     // of the split tiles
  int split;     // number of the key tile among these
  bool more;     // the range begins another, which comes next
  int dq_head;   // of the key heads of all batches
  int dq_begin;  // [dq_begin, dq_end) of all row tiles; -1: there are no more tasks
  int dq_end;

  // The order of key tiles: first tile 0 of all heads of a group, then their tile 1, ...: CTAs that read the same Q and dO
  // run at about the same time, and with a causal mask the longest come first. CTAs that wait for each other's sums of dQ
  // are far enough apart to hide the latency from one to the next. After whole tiles come the ranges of the split ones, the
  // last range first, since one waits for parts of those after it. The shares of dQ have the order of the tiles, `dq_lag`
  // tasks behind. `begin` is set.
  template <class Traits>
  CUTE_DEVICE static void make(KernelArgs const& args, int index, Task volatile& task) {
    TileSplit const& split = args.params.split;
    int const first_range = args.params.task_order.tiles - split.tiles;
    task.n_block = -1;
    task.end = task.begin;
    task.parts = 0;
    task.more = false;
    if (index < first_range) {
      Place const keys(args, index);
      if (keys.number < args.params.n_blocks) KeyTile::make<Traits>(args, keys.head, keys.number, task);
    } else if (int const range = first_range + split.ranges - 1 - index; range >= 0) {
      make_part<Traits>(args, range, split.range_begin(range) / split.steps, task);
    }
    Place const share(args, index - args.params.task_order.dq_lag);
    int const row_tiles = args.params.m_blocks * args.params.group;
    task.dq_head = share.head;
    task.dq_begin = share.head * row_tiles + min(row_tiles, share.number * args.params.task_order.dq_share);
    task.dq_end = share.head * row_tiles + min(row_tiles, (share.number + 1) * args.params.task_order.dq_share);
  }

  // The tile that the range of the task before begins. No dQ: that task had it.
  template <class Traits>
  CUTE_DEVICE static void make_second(KernelArgs const& args, Task const volatile& before, Task volatile& task) {
    task.dq_begin = 0;
    task.dq_end = 0;
    make_part<Traits>(args, before.range, before.split + 1, task);
  }

 private:
  // What a range has of the tile-th split key tile.
  template <class Traits>
  CUTE_DEVICE static void make_part(KernelArgs const& args, int range, int tile, Task volatile& task) {
    TileSplit const& split = args.params.split;
    Place const keys(args, args.params.task_order.tiles - split.tiles + tile);
    KeyTile::make<Traits>(args, keys.head, keys.number, task);
    int const begin = max(split.range_begin(range) - tile * split.steps, 0);
    int const end = split.range_begin(range + 1) - tile * split.steps;
    task.first.m_block = args.params.m_blocks - 1 - begin / args.params.group;
    task.first.head = begin % args.params.group;
    task.end = task.begin + min(end, split.steps) - begin;
    task.parts = begin > 0 ? -1 : split.parts(tile, range);
    task.range = range;
    task.split = tile;
    task.more = end > split.steps;
  }

  // The KV head and the tile (or share) in it that a task has.
  struct Place {
    static constexpr int kNone = 1 << 27;  // more than a head has of tiles or shares
    static_assert((int64_t{kNone} + 1) * kMaxDqShare <= INT_MAX);

    int head = 0;
    int number = kNone;

    CUTE_DEVICE Place(KernelArgs const& args, int index) {
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

}  // namespace flash_cute::sm90::bwd
