// What one launch of the Hopper backward is given, built on the host.
#pragma once

#include <cuda.h>
#include <cute/config.hpp>

#include "../params.h"

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
  int n_blocks;
  int m_blocks;
  int group;         // query heads of one key head
  int heads_abreast; // key heads whose tiles of one number are neighbours in launch order
};

// The key tile that a CTA owns. In launch order come tile 0 of `heads_abreast` key heads, then their tile 1, ...:
// CTAs that read the same Q and dO run at about the same time, and with a causal mask the longest come first. CTAs
// that wait for each other's sums of dQ have a distance that hides the way from one to the next.
struct KeyTile {
  int n_block;
  int head_kv;
  int batch;

  CUTE_DEVICE explicit KeyTile(BwdArgs const& args) {
    int block;  // read anew at each use: nothing of the tile stays in registers through the main loop
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    int const first = block / (args.n_blocks * args.heads_abreast) * args.heads_abreast;
    int const place = block - first * args.n_blocks;
    int const abreast = min(args.heads_abreast, args.params.batch * args.params.heads_kv - first);
    n_block = place / abreast;
    int const head = first + place % abreast;
    head_kv = head % args.params.heads_kv;
    batch = head / args.params.heads_kv;
  }
};

}  // namespace flash_cute::sm90
