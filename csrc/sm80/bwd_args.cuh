// What one launch of the portable backward is given, and how it is divided.
#pragma once

#include <cute/config.hpp>

#include "../params.h"

namespace flash_cute::sm80 {

struct BwdArgs {
  BwdParams params;
  int n_blocks;
  int m_blocks;
  int group;          // query heads of one key head
  int heads_abreast;  // key heads of a group: their tiles of one number are neighbours in launch order
  int last_group;     // its number; it has all the heads that remain
};

// A number as if it were new: the compiler holds nothing that it computed from it before. Registers are what the
// accumulators leave; what it held across the loop, it spilled.
CUTE_DEVICE int fresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The key tile that a CTA owns. In launch order come tile 0 of a group of key heads, then their tile 1, ...:
// CTAs that read the same Q and dO run at about the same time, and with a causal mask the longest come first. CTAs
// that wait for each other's turn at dQ have a distance that hides the way from one to the next.
struct KeyTile {
  int n_block;
  int head_kv;
  int batch;

  CUTE_DEVICE explicit KeyTile(BwdArgs const& args) {
    int block;  // read anew at each use: the epilogue's tile stays in no register through the main loop
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    int const number = min(block / (args.n_blocks * args.heads_abreast), args.last_group);
    int const first = number * args.heads_abreast;
    int const place = block - first * args.n_blocks;
    int const heads = args.params.batch * args.params.heads_kv;
    int const abreast = number < args.last_group ? args.heads_abreast : heads - first;
    n_block = place / abreast;
    int const head = first + place % abreast;
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
