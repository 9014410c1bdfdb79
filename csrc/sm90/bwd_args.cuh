// What one launch of the Hopper backward is given, built on the host.
#pragma once

#include <climits>

#include <cuda.h>

#include "../core/mask.cuh"

namespace flash_cute::sm90 {

struct BwdArgs {
  CUtensorMap q;     // box (BLK_M, kChunk)
  CUtensorMap dout;  // box (BLK_M, kChunk)
  CUtensorMap k;     // box (BLK_N, kChunk)
  CUtensorMap v;     // box (BLK_N, kChunk)
  CUtensorMap dk;    // box (64, kChunk)
  CUtensorMap dv;    // box (64, kChunk)
  CUtensorMap dq;    // box (64, kChunk), above head dim 128
  BwdParams params;
  int num_tasks;
  int tasks_per_head;  // at least n_blocks
  int dq_share;        // row tiles of dQ a task
  int dq_lag;          // tasks by which that is behind the key tiles
  int n_blocks;
  int m_blocks;
  int group;           // query heads of one key head
  int heads_abreast;   // key heads whose key tiles of one number are neighbours in the order of tasks
  int larger_groups;   // of heads abreast, the first ones, which have one head more
};

// A key tile of a CTA's. It stands in shared memory, and the threads with few registers read it anew at each use.
struct KeyTile {
  int n_block;     // -1: none
  int head_kv;
  int batch;
  int m_begin;     // its row tiles are [m_begin, m_blocks), of all query heads of the group
  int keys_phase;  // of the buffers of K and V

  // `head`: of the key heads of all batches.
  template <class Traits>
  CUTE_DEVICE static void make(BwdArgs const& args, int head, int n_block, KeyTile volatile& tile) {
    tile.n_block = n_block;
    tile.head_kv = head % args.params.heads_kv;
    tile.batch = head / args.params.heads_kv;
    tile.m_begin = row_range<typename Traits::Mask, Traits::kBlockM, Traits::kBlockN>(args.params, n_block).begin;
  }
};

// A row tile on a key tile's way: the last one of each of the group's query heads comes first, then the one before it.
// So all key tiles of a head begin with the same rows and go on together, and none waits for key tile 0 to store dQ of
// rows that itself has no key for.
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

constexpr int kMaxDqShare = 8;  // row tiles of dQ a task, where there are many for few key tiles

// What a CTA does in one go: a key tile, and dQ of some row tiles of a head whose sums are complete by then.
struct Task : KeyTile {
  int dq_head;   // of the key heads of all batches
  int dq_begin;  // [dq_begin, dq_end) of all row tiles; -1: there are no more tasks
  int dq_end;

  // The order of key tiles: first tile 0 of all heads abreast, then their tile 1, ...: CTAs that read the same
  // Q and dO run at about the same time, and with a causal mask the longest come first. CTAs that wait for each
  // other's sums of dQ have a distance that hides the way from one to the next. The shares of dQ have the same order,
  // `dq_lag` tasks behind.
  template <class Traits>
  CUTE_DEVICE static void make(BwdArgs const& args, int index, Task volatile& task) {
    task.n_block = -1;
    task.m_begin = args.m_blocks;
    Place const keys(args, index);
    if (keys.number < args.n_blocks) KeyTile::make<Traits>(args, keys.head, keys.number, task);
    Place const share(args, index - args.dq_lag);
    int const row_tiles = args.m_blocks * args.group;
    task.dq_head = share.head;
    task.dq_begin = share.head * row_tiles + min(row_tiles, share.number * args.dq_share);
    task.dq_end = share.head * row_tiles + min(row_tiles, (share.number + 1) * args.dq_share);
  }

 private:
  struct Place {
    static constexpr int kNone = 1 << 27;  // more than a head has of tiles or shares
    static_assert((int64_t{kNone} + 1) * kMaxDqShare <= INT_MAX);

    int head = 0;
    int number = kNone;

    CUTE_DEVICE Place(BwdArgs const& args, int index) {
      if (unsigned(index) >= unsigned(args.params.batch * args.params.heads_kv * args.tasks_per_head)) return;
      int const heads_of_larger = args.larger_groups * (args.heads_abreast + 1);
      bool const larger = index < heads_of_larger * args.tasks_per_head;
      int const first = larger ? 0 : heads_of_larger, abreast = args.heads_abreast + larger;
      int const group = (index - first * args.tasks_per_head) / (abreast * args.tasks_per_head);
      int const place = (index - first * args.tasks_per_head) % (abreast * args.tasks_per_head);
      head = first + group * abreast + place % abreast;
      number = place / abreast;
    }
  };
};

}  // namespace flash_cute::sm90
