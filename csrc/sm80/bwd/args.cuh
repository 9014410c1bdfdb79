// What one launch of the portable backward is given, and how it is divided.
#pragma once

#include <cute/config.hpp>

#include "../../params.h"

namespace flash_cute::sm80::bwd {

struct KernelArgs {
  BwdParams params;
  int n_blocks;
  int m_blocks;
  int group;          // query heads of one key head
  int heads_abreast;  // key heads of a group: their tiles of one number are neighbours in launch order
  int last_group;     // its number; it has all the heads that remain
  bool last_first;    // deterministic: key tiles from the last to the first, row tiles from the first to the last
};

// A number as if it were new: the compiler holds nothing that it computed from it before. Registers are what the
// accumulators leave; what it held across the loop, it spilled.
CUTE_DEVICE int fresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The key tile that a CTA owns. In launch order come the first tiles of a group of key heads, then their second ones,
// ...: CTAs that read the same Q and dO run at about the same time. From tile 0 on, which with a causal mask is the
// longest; or from the last one, see KernelArgs::last_first.
struct KeyTile {
  int n_block;
  int head_kv;
  int batch;

  CUTE_DEVICE KeyTile(KernelArgs const& args, bool last_first) {
    int block;  // read anew at each use: the epilogue's tile stays in no register through the main loop
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    int const number = min(block / (args.n_blocks * args.heads_abreast), args.last_group);
    int const first = number * args.heads_abreast;
    int const place = block - first * args.n_blocks;
    int const heads = args.params.batch * args.params.heads_kv;
    int const abreast = number < args.last_group ? args.heads_abreast : heads - first;
    n_block = last_first ? args.n_blocks - 1 - place / abreast : place / abreast;
    int const head = first + place % abreast;
    head_kv = head % args.params.heads_kv;
    batch = head / args.params.heads_kv;
  }
};

// A row tile on a key tile's way over those that see it, head after head.
struct RowTile {
  int head;  // of q
  int m_block;

  // To the next one of [begin, end), up or down; behind the last one to the first one of another head.
  CUTE_DEVICE void step(bool up, int begin, int end, int heads) {
    if (m_block == (up ? end - 1 : begin)) {
      m_block = up ? begin : end - 1;
      head += heads;
    } else {
      m_block += up ? 1 : -1;
    }
  }

  // Its place among all row tiles: that of its sums and statistics in the workspace.
  CUTE_DEVICE int64_t index(KernelArgs const& args, int batch) const {
    return (int64_t{batch} * args.params.heads_q + head) * args.m_blocks + m_block;
  }
};

}  // namespace flash_cute::sm80::bwd
