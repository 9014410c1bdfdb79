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
  CUtensorMap dq;    // box (BLK_M, kChunk)
  BwdParams params;
  int num_tiles;      // key tiles of all heads
  int n_blocks;
  int m_blocks;
  int group;          // query heads of one key head
  int heads_abreast;  // key heads whose tiles of one number are neighbours in the order of tiles
};

// A key tile of a CTA's. It stands in shared memory and is read anew at each use: nothing of it stays in registers.
struct KeyTile {
  int n_block;     // -1: there are no more
  int head_kv;
  int batch;
  int m_begin;     // its row tiles are [m_begin, m_blocks), of each query head of the group
  int keys_phase;  // of the buffers of K and V

  // The index-th. First come tile 0 of `heads_abreast` key heads, then their tile 1, ...: CTAs that read the same Q
  // and dO run at about the same time, and with a causal mask the longest come first. CTAs that wait for each other's
  // sums of dQ have a distance that hides the way from one to the next.
  template <class Traits>
  CUTE_DEVICE static void make(BwdArgs const& args, int index, KeyTile volatile& tile) {
    int const first = index / (args.n_blocks * args.heads_abreast) * args.heads_abreast;
    int const place = index - first * args.n_blocks;
    int const abreast = min(args.heads_abreast, args.params.batch * args.params.heads_kv - first);
    int const n_block = place / abreast, head = first + place % abreast;
    tile.n_block = n_block;
    tile.head_kv = head % args.params.heads_kv;
    tile.batch = head / args.params.heads_kv;
    tile.m_begin = row_range<typename Traits::Mask, Traits::kBlockM, Traits::kBlockN>(args.params, n_block).begin;
  }
};

}  // namespace flash_cute::sm90
