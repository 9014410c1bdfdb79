// What the module tells Python of a kernel, as plain data.
#pragma once

#include <map>
#include <string>
#include <vector>

struct FwdProblem {
  int batch, heads_q, heads_kv, len_q, len_k, head_dim, diagonal;
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

// One entry of an architecture's tile table at one (head dim, mask).
struct Kernel {
  std::string arch;
  std::string mask;
  std::string config;
  int config_index;
  int head_dim;
  std::map<std::string, int> tile;   // FwdTile's fields
  std::map<std::string, int> shape;  // KernelShape's: what the plan tells `explain`
  std::map<std::string, int> facts;  // of the traits
  Details (*describe)();
  // (5, tiles): m_block, head, batch, and of its key range `unmasked` and `end`, in the launch's order; a
  // persistent grid of `ctas` has two rows more, the CTA and its round.
  Array (*schedule)(FwdProblem const&, int ctas);
  // (len_q): the first column that each row does not see.
  Array (*column_limits)(FwdProblem const&);
  // (BLK_M, BLK_N): how many threads set this score to -inf when the tile is masked, plus 1000 times how many
  // hold it.
  Array (*masked)(FwdProblem const&, int m_block, int n_block);
};

using Registry = std::vector<Kernel>;
