// What one launch of the Hopper backward is given, built on the host.
#pragma once

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
  CUtensorMap dq;    // box (64, kChunk)
  BwdParams params;
  int num_tasks;
  int tasks_per_head;  // at least n_blocks
  int dq_share;        // row tiles of dQ a task
  int dq_shares;       // of a key head
  int n_blocks;
  int m_blocks;
  int group;          // query heads of one key head
  int heads_abreast;  // key heads whose key tiles of one number are neighbours in the order of tasks
};

// A key tile of a CTA's. It stands in shared memory and is read anew at each use: nothing of it stays in registers.
struct KeyTile {
  int n_block;     // -1: none
  int head_kv;
  int batch;
  int m_begin;     // its row tiles are [m_begin, m_blocks), of each query head of the group
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

// What a CTA does in one go: a key tile of a head, then dQ of some row tiles of a head before it, whose sums are
// complete by then.
struct Task : KeyTile {
  int dq_head;   // of the key heads of all batches
  int dq_begin;  // [dq_begin, dq_end) of all row tiles; -1: there are no more tasks
  int dq_end;

  // The index-th. First come key tile 0 of `heads_abreast` key heads, then their tile 1, ...: CTAs that read the same
  // Q and dO run at about the same time, and with a causal mask the longest come first. CTAs that wait for each
  // other's sums of dQ have a distance that hides the way from one to the next. Each of these tasks has a share of the
  // dQ of the head `heads_abreast` before its own; the last tasks have nothing but the last heads' dQ.
  template <class Traits>
  CUTE_DEVICE static void make(BwdArgs const& args, int index, Task volatile& task) {
    int const heads = args.params.batch * args.params.heads_kv, abreast = args.heads_abreast;
    int const rest = index - heads * args.tasks_per_head;
    int number, dq_head;
    task.n_block = -1;
    task.m_begin = args.m_blocks;
    if (rest < 0) {
      int const first = index / (args.tasks_per_head * abreast) * abreast;
      int const place = index - first * args.tasks_per_head;
      int const neighbours = min(abreast, heads - first);
      int const head = first + place % neighbours;
      number = place / neighbours;
      dq_head = head - abreast;
      if (number < args.n_blocks) KeyTile::make<Traits>(args, head, number, task);
    } else {
      number = rest % args.dq_shares;
      dq_head = heads - abreast + rest / args.dq_shares;
    }
    int const row_tiles = args.m_blocks * args.group;
    task.dq_head = dq_head;
    task.dq_begin = max(0, dq_head) * row_tiles + min(row_tiles, number * args.dq_share);
    task.dq_end = dq_head < 0 ? 0 : dq_head * row_tiles + min(row_tiles, (number + 1) * args.dq_share);
  }
};

}  // namespace flash_cute::sm90
