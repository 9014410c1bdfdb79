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
  float* mean;             // (batch, heads_kv, head_dim): x's over its rows, rotated as x is, which is subtracted; or null
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
  int arrays;       // of a block's statistics by column, with a mean: the sum, and per head the largest and the least
  int hadamard;     // the size of the transforms that each row is cut into; 0: none
  float hadamard_scale;  // 1 / sqrt(hadamard)
  Signs signs;

  int const* cu_seqlens;  // (batch + 1); null: dense

  // Workspace. The first `zeroed_bytes` from `ticket` on are zeroed before the launch.
  unsigned* ticket;
  unsigned* arrived;   // (groups): blocks whose statistics are there, and 1 when the mean is
  unsigned* amax;      // without a mean, (groups) or per channel (groups, head_dim): bits of the largest |x| so far
  int64_t zeroed_bytes;
  float* partials;     // (tasks, arrays, head_dim): statistics of a block by column
  int* sequences;      // packed: SequenceTable's numbers
};

// Numbers of `sequences` for a batch of so many: starts, lengths, and blocks of a head before each and in all, with two
// sequences more, the rows before the first one and those behind the last one; and the most blocks of a sequence.
constexpr int64_t sequence_numbers(int64_t batch) { return 3 * (batch + 2) + 2; }

// Blocks with descales of their own need the mean alone.
constexpr int arrays_of(Per per, bool centers) { return !centers ? 0 : per == Per::kBlock ? 1 : 3; }

}  // namespace flash_cute::quantize
