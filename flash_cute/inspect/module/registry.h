// What the module tells Python of a kernel, as plain data.
#pragma once

#include <map>
#include <string>
#include <vector>

struct Problem {
  int batch, heads_q, heads_kv, len_q, len_k, head_dim, lower, upper;
};

// A packed batch, causal or with a window: `window_left` and `window_right` keys, kNoLimit for all.
struct PackedProblem {
  std::vector<int> cu_q, cu_k;  // (sequences + 1)
  int heads_q, heads_kv, head_dim, window_left, window_right;
  bool bottom_right;
};

// The first mode varies fastest (numpy's order "F").
struct Array {
  std::vector<int> shape;
  std::vector<int> data;
};

struct Buffer {
  std::string name;
  int offset;  // bytes from the start of the CTA's dynamic shared memory
  int bytes;
};

struct Details {
  std::vector<Buffer> buffers;
  std::map<std::string, int> facts;
  std::map<std::string, Array> arrays;
  std::map<std::string, std::vector<int>> swizzles;  // of a shared-memory layout: cute::Swizzle's three numbers
};

// One entry of a kernel's tile table at one head dim.
struct Kernel {
  std::string arch;
  std::string folder;  // of csrc/<arch>
  std::string entry;
  int entry_index;
  int head_dim;
  std::map<std::string, int> tile;   // TileConfig's fields
  std::map<std::string, int> shape;  // KernelShape's: what the plan tells `explain`
  std::map<std::string, int> facts;  // of the traits
  Details (*describe)();
  // (7, tiles): m_block, head, batch, and of its range of key tiles begin, whole_begin, whole_end and end, in the
  // launch's order; a persistent grid has five rows more: the CTA, its round, and of this visit the key tiles [begin,
  // end) and the parts. Null of a backward.
  Array (*schedule)(Problem const&, int num_sms);
  // (BLK_M, BLK_N): how many threads set this score to -inf when the tile is masked, plus 1000 times how many
  // hold it.
  Array (*masked)(Problem const&, int m_block, int n_block);
  // (11, tiles), see sm90_forward_packed.h. Null where there is no kernel of packed batches.
  Array (*packed_schedule)(PackedProblem const&, int num_sms) = nullptr;
};

using Registry = std::vector<Kernel>;
