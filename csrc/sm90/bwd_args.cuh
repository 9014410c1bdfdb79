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
  int group;  // query heads of one key head
};

// The key tile that a CTA owns. Tiles of one head are neighbours in launch order: their CTAs read the same Q
// and dO at about the same time, and with a causal mask the longest come first.
struct KeyTile {
  int n_block;
  int head_kv;
  int batch;

  CUTE_DEVICE explicit KeyTile(BwdArgs const& args) {
    int const head = int(blockIdx.x) / args.n_blocks;
    n_block = int(blockIdx.x) % args.n_blocks;
    head_kv = head % args.params.heads_kv;
    batch = head / args.params.heads_kv;
  }
};

}  // namespace flash_cute::sm90
