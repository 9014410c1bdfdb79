// The parameters of a quantisation to float8: plain data, valid on host and device.
//
// A tensor (batch, heads, rows, head_dim), or a packed one (rows, heads, head_dim), is worked on in blocks of 128 rows
// of one head of one sequence. A group is what shares statistics: the heads of one KV head of one sequence. Groups have
// numbers: sequence * heads_kv + KV head. The tasks of a group follow one another, and so do the groups.
#pragma once

#include <cstdint>

#include "contract/params.h"

namespace flash_cute::quantize {

constexpr int kBlockRows = 128;
constexpr int kMaxHeadDim = 256;
constexpr int kHeadDimUnit = 16;  // so that rows of float8 are whole 16-byte vectors

enum class Input { kFloat16, kBFloat16, kFloat32 };

// What has a descale of its own: a group, a block of a head, or a column of a group.
enum class Per { kHead, kBlock, kChannel };

// Signs of the columns before a Hadamard transform: a set bit is -1.
struct Signs {
  uint32_t words[kMaxHeadDim / 32];
};

struct Params {
  void const* x;
  uint8_t* out;
  float* descale;          // contiguous: (batch, heads_kv), (batch, heads, descale_blocks), (batch, heads_kv, head_dim)
  float* mean;             // (batch, heads_kv, head_dim): x's over its rows, rotated as x is; or null
  float const* key_mean;   // (batch, heads_kv, head_dim): that of k, to be multiplied by each row of q; or null
  float* shift;            // with key_mean: the products, (batch, heads, rows) or packed (heads, rows)

  Strides strides;  // of packed tensors the batch's does not matter; rows of x are whole 16-byte vectors
  Strides out_strides;
  Strides shift_strides;

  int batch;  // of packed tensors the sequences
  int heads;
  int heads_kv;  // divides heads
  int rows;      // of a batch item, or of all sequences
  int head_dim;
  int blocks;          // dense: of a head
  int descale_blocks;  // Per::kBlock: entries of that dim
  int task_limit;      // at least as many as there are

  Input input;
  Per per;
  bool is_e5m2;
  bool centers;     // subtracts the mean
  bool has_statistics;  // of whole groups, which come before any block is written
  int amax_width;   // numbers of a group in `amax`
  int hadamard;     // the size of the transforms that each row is cut into; 0: none
  float hadamard_scale;  // 1 / sqrt(hadamard)
  Signs signs;

  int const* cu_seqlens;  // (batch + 1); null: dense

  // Workspace. The first `zeroed_bytes` from `ticket` on are zeroed before the launch.
  unsigned* ticket;
  unsigned* arrived;   // (groups): blocks whose statistics are there, and 1 when the mean is
  unsigned* amax;      // (groups, amax_width): the largest |x| so far, as bits, or that of each column; with a mean,
                       // per head, the largest x and the largest -x of each column, as to_key has them
  int64_t zeroed_bytes;
  float* partials;     // with a mean, (tasks, head_dim): a block's sums by column
  int* sequences;      // packed: SequenceTable's numbers
};

// Numbers of `sequences` for a batch of so many: starts, lengths, and blocks of a head before each and in all, with two
// sequences more, the rows before the first one and those behind the last one; and the most blocks of a sequence.
constexpr int64_t sequence_numbers(int64_t batch) { return 3 * (batch + 2) + 2; }

constexpr int amax_width_of(Per per, bool centers, int head_dim) {
  if (per == Per::kBlock) return 0;
  return centers ? 2 * head_dim : per == Per::kChannel ? head_dim : 1;
}

}  // namespace flash_cute::quantize
