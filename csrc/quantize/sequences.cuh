// Where the sequences of a packed tensor are, and which block a task is.
#pragma once

#include "core/sequence_prefix.cuh"
#include "params.h"

namespace flash_cute::quantize {

// Params::sequences. Sequences `batch` and `batch` + 1 are the rows before the first one and behind the last one.
struct SequenceTable {
  int* starts;         // (batch + 2)
  int* lengths;        // (batch + 2)
  int* blocks_before;  // (batch + 3), of one head
  int* most_blocks;    // (1)

  CUTE_DEVICE explicit SequenceTable(Params const& params)
      : starts(params.sequences),
        lengths(starts + params.batch + 2),
        blocks_before(lengths + params.batch + 2),
        most_blocks(blocks_before + params.batch + 3) {}
};

CUTE_DEVICE int blocks_of(int length) { return (length + kBlockRows - 1) / kBlockRows; }

// Fills the table. Offsets count as ascending and inside the tensor, see core/sequence.cuh. One CTA.
template <int kArch>
__global__ void __launch_bounds__(sequence_prefix::kThreads) sequences_kernel(__grid_constant__ Params const params) {
  SequenceTable const table(params);
  int const* const cu = params.cu_seqlens;
  int const sequences = params.batch + 2, per_thread = ceil_div(sequences, int{sequence_prefix::kThreads});
  int const begin = min(static_cast<int>(threadIdx.x) * per_thread, sequences);
  int const end = min(begin + per_thread, sequences);
  auto const offset = [&](int index) { return read_offset(cu, params.rows, min(index, params.batch)); };
  int own_floor = 0;
  for (int index = begin; index < end; ++index) own_floor = max(own_floor, offset(index));
  int floor = sequence_prefix::exclusive_max(own_floor);
  int own_blocks = 0, own_most = 0;
  for (int index = begin; index < end; ++index) {
    int const start = max(floor, offset(index));  // of index `batch` on: where the last sequence ends
    floor = start;
    int const next = index < params.batch ? max(start, offset(index + 1)) : params.rows;
    int const length = index == params.batch ? offset(0) : next - start;
    table.starts[index] = index == params.batch ? 0 : start;
    table.lengths[index] = length;
    own_blocks += blocks_of(length);
    own_most = max(own_most, blocks_of(length));
  }
  int all;
  int before = sequence_prefix::exclusive_sum(own_blocks, all);
  int const most_before = sequence_prefix::exclusive_max(own_most);
  for (int index = begin; index < end; ++index) {
    table.blocks_before[index] = before;
    before += blocks_of(table.lengths[index]);
  }
  if (threadIdx.x == sequence_prefix::kThreads - 1) {
    table.blocks_before[sequences] = all;
    *table.most_blocks = max(most_before, own_most);
  }
}

// A block of a head, and the group that it belongs to.
struct Block {
  int batch;         // of the tensor: the sequence, or 0 of a packed one
  int sequence;
  int head;
  int block;         // of the sequence
  int64_t row;       // its first, in the tensor
  int rows;          // of the block
  int length;        // of the sequence
  int group;
  int group_begin;   // its first task
  int group_tasks;
  bool is_unused;    // rows of no sequence

  CUTE_DEVICE int64_t offset(Strides const& strides) const {
    return batch * strides.batch + head * strides.head + row * strides.row;
  }
};

struct Work {
  int tasks;
  int longest_group;  // tasks
};

CUTE_DEVICE Work read_work(Params const& params) {
  int const per_group = params.heads / params.heads_kv;
  if (params.cu_seqlens == nullptr) {
    return {params.batch * params.heads * params.blocks, per_group * params.blocks};
  }
  SequenceTable const table(params);
  return {table.blocks_before[params.batch + 2] * params.heads, per_group * *table.most_blocks};
}

CUTE_DEVICE Block find_block(Params const& params, int task) {
  int sequence, before = 0, first_row = 0, length = params.rows;
  if (params.cu_seqlens == nullptr) {
    sequence = task / (params.heads * params.blocks);
    before = sequence * params.blocks;
  } else {
    SequenceTable const table(params);
    int low = 0, high = params.batch + 2;  // blocks_before[low] <= task / heads < blocks_before[high]
    int const of_head = task / params.heads;
    while (high - low > 1) {
      int const middle = (low + high) / 2;
      (table.blocks_before[middle] <= of_head ? low : high) = middle;
    }
    sequence = low;
    before = table.blocks_before[sequence];
    first_row = table.starts[sequence];
    length = table.lengths[sequence];
  }
  int const blocks = blocks_of(length), per_group = params.heads / params.heads_kv;
  int const local = task - before * params.heads;
  int const head = local / blocks, block = local % blocks, head_kv = head / per_group;
  return {.batch = params.cu_seqlens == nullptr ? sequence : 0,
          .sequence = sequence,
          .head = head,
          .block = block,
          .row = int64_t{first_row} + block * kBlockRows,
          .rows = min(kBlockRows, length - block * kBlockRows),
          .length = length,
          .group = sequence * params.heads_kv + head_kv,
          .group_begin = before * params.heads + head_kv * per_group * blocks,
          .group_tasks = per_group * blocks,
          .is_unused = sequence >= params.batch};
}

}  // namespace flash_cute::quantize
