// The numbers of tiles of a problem.
#pragma once

#include <climits>
#include <string>

#include "check.h"
#include "problem.h"

namespace flash_cute {

// Tiles of `block` rows or keys over all heads.
inline int64_t num_tiles(int length, int block, int64_t heads) { return (int64_t{length} + block - 1) / block * heads; }

// Row tiles over all query heads: the units of work of a forward.
inline int64_t num_row_tiles(Problem const& problem, int block_m) {
  return num_tiles(problem.len_q, block_m, int64_t{problem.batch} * problem.heads_q);
}

// Key tiles over all KV heads: one tile serves all query heads of its KV head.
inline int64_t num_key_tiles(Problem const& problem, int block_n) {
  return num_tiles(problem.len_k, block_n, int64_t{problem.batch} * problem.heads_kv);
}

// The tiles per head of a batch whose sequences the kernel reads at run time, `length` rows or keys long. Of a packed
// one the host knows the most that there can be: each sequence, or rows before and behind them, may end in a tile that
// is not full.
inline int64_t most_tiles(Problem const& problem, int length, int block) {
  if (!problem.packed) return num_tiles(length, block, problem.batch);
  return int64_t{length} / block + std::min<int64_t>(length, int64_t{problem.batch} + 2);
}
inline int64_t most_row_tiles(Problem const& problem, int block_m) {
  return most_tiles(problem, problem.len_q, block_m) * problem.heads_q;
}
inline int64_t most_key_tiles(Problem const& problem, int block_n) {
  return most_tiles(problem, problem.len_k, block_n) * problem.heads_kv;
}

// The query rows that the longest key tile visits, of one query head.
inline int64_t most_rows_of_key_tile(Problem const& problem, int block_n) {
  Band const& band = problem.band;
  bool const both = band.has_lower() && band.has_upper();
  int64_t const width = both ? int64_t{band.upper} - band.lower + 1 : INT_MAX;  // rows that see a key
  return std::min<int64_t>(problem.len_q, width + block_n);
}

// The shapes of q and k, for messages.
inline std::string shape_text(Problem const& problem, int heads, int length) {
  auto const text = [](std::initializer_list<int> sizes) {
    std::string result;
    for (int size : sizes) result += (result.empty() ? "(" : ", ") + std::to_string(size);
    return result + ")";
  };
  if (problem.packed) return text({length, heads, problem.head_dim});
  return text({problem.batch, heads, length, problem.head_dim});
}
inline std::string q_text(Problem const& problem) {
  return shape_text(problem, problem.heads_q, std::max(problem.len_q, problem.lse_rows));
}
inline std::string k_text(Problem const& problem) { return shape_text(problem, problem.heads_kv, problem.len_k); }

// Kernels number tiles by 32 bits.
inline void check_row_tiles(Problem const& problem, int64_t tiles, int block) {
  FLASH_CUTE_CHECK(tiles <= INT_MAX, "q: expected at most 2^31 - 1 tiles of ", block, " rows, got ", tiles, " with ",
                   q_text(problem));
}
inline void check_key_tiles(Problem const& problem, int64_t tiles, int block) {
  FLASH_CUTE_CHECK(tiles <= INT_MAX, "k: expected at most 2^31 - 1 tiles of ", block, " keys, got ", tiles, " with ",
                   k_text(problem));
}

}  // namespace flash_cute
