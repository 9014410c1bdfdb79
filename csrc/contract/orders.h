// The orders in which the CTAs of a backward take their work, as the host decides them. Plain data; the functions that
// decide are beside the kernels, see order.h there.
#pragma once

namespace flash_cute {

// The key tiles of the sm80 backward.
struct LaunchOrder {
  int interleaved_heads;  // KV heads per group, whose key tiles are interleaved in launch order (tile 0 of each head,
                          // then tile 1, ...), so that CTAs running together share Q and dO in L2
  int last_group;         // its index; it has all the heads that remain
  bool last_first;        // deterministic: key tiles from last to first, row tiles from first to last
};

// The tasks of the sm90 backward up to head dim 128, and of 192/128. A task is a key tile and a share of dQ's
// conversion to 16-bit rows. Task i has key tile i in the order of groups of interleaved heads, and share i - `dq_lag`
// in the same order.
struct TaskOrder {
  int tiles;              // tasks_per_head * KV heads of all batches
  int tasks_per_head;     // per KV head: at least its key tiles, more where its row tiles need more shares
  int num_tasks;          // `tiles` + `dq_lag`; the last tasks have no key tile, and ranges replace split tiles
  int dq_share;           // row tiles of dQ per task
  int dq_lag;             // tasks by which the shares of dQ come later than the key tiles
  int interleaved_heads;  // KV heads per group, whose key tiles are interleaved: tile 0 of each head, then tile 1, ...
  int larger_groups;      // the first `larger_groups` groups have one more head
};

}  // namespace flash_cute
