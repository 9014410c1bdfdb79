// What one launch of the portable backward is given, and how it is divided.
#pragma once

#include <cute/config.hpp>

#include "../params.h"

namespace flash_cute::sm80 {

struct BwdArgs {
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
    int index;  // read anew each time: the epilogue's tile stays in no register during the loop
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    int const head = index / args.n_blocks;
    n_block = index % args.n_blocks;
    head_kv = head % args.params.heads_kv;
    batch = head / args.params.heads_kv;
  }
};

// A row tile on a key tile's way: the last tile of each of the group's heads comes first.
struct RowTile {
  int head;  // of q
  int m_block;

  CUTE_DEVICE void advance(int begin, int end) {
    if (m_block-- == begin) {
      m_block = end - 1;
      ++head;
    }
  }

  // Its place among all row tiles: that of its sums and statistics in the workspace.
  CUTE_DEVICE int64_t index(BwdArgs const& args, int batch) const {
    return (int64_t{batch} * args.params.heads_q + head) * args.m_blocks + m_block;
  }
};

}  // namespace flash_cute::sm80
