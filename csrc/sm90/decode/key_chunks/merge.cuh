// The kernel that folds the parts of chunks, one warp for each row.
#pragma once

#include "epilogue.cuh"
#include "fold.cuh"
#include "schedule.cuh"

namespace flash_cute::sm90::decode::key_chunks {

constexpr int kMergeWarps = 8;

inline int64_t merge_ctas(Params const& params) {
  Slots const& slots = params.slots;
  return int64_t{params.batch} * slots.head_tiles * slots.row_tiles * ((slots.rows + kMergeWarps - 1) / kMergeWarps);
}

// The floors of sequence `index`: by the whole warp.
CUTE_DEVICE Floors find_floors(Params const& params, int index) {
  if (params.sequences.cu_q == nullptr) return {0, 0};
  Floors floors{0, 0};
  for (int i = int(threadIdx.x % 32); i <= index; i += 32) {
    floors = {max(floors.rows, row_begin(params, i)), max(floors.keys, key_begin(params, i))};
  }
  return {int(__reduce_max_sync(forward::kAllLanes, unsigned(floors.rows))),
          int(__reduce_max_sync(forward::kAllLanes, unsigned(floors.keys)))};
}

template <class Traits>
CUTE_DEVICE void merge_row(Params const& params, int block, int warp) {
  using Element = typename Traits::Element;
  constexpr int kHeadDim = Traits::kHeadDim, kColumns = kHeadDim / 32;  // of a lane
  Slots const& slots = params.slots;
  int const groups = (slots.rows + kMergeWarps - 1) / kMergeWarps, packed = block % groups * kMergeWarps + warp;
  block /= groups;
  int const m_block = block % slots.row_tiles, head_tile = block / slots.row_tiles % slots.head_tiles;
  int const index = block / slots.row_tiles / slots.head_tiles;
  Sequence const sequence = read_sequence(params, index, find_floors(params, index));
  int const row = m_block * params.rows.positions + packed / params.heads;
  int const head = head_tile * params.rows.heads + packed % params.heads;
  ChunkRange const chunks = chunks_of<Traits>(sequence);
  if (packed >= slots.rows || row >= sequence.rows || is_long(params, sequence) || chunks.count == 1) return;
  int64_t const first_part =
      index * slots.parts() + (int64_t{head_tile} * slots.row_tiles + m_block) * slots.chunks;
  int const column = int(threadIdx.x % 32) * kColumns;
  RowState fold{};
  float acc[kColumns];
#pragma unroll 8
  for (int i = 0; i < chunks.count; ++i) {
    Part const part = Part::of(params.parts, slots, kHeadDim, first_part + i);
    RowState const state{__ldcg(part.statistics + packed), __ldcg(part.statistics + slots.rows + packed),
                         __ldcg(part.statistics + 2 * slots.rows + packed)};
    float2 words[kColumns / 2];
    CUTE_UNROLL
    for (int j = 0; j < kColumns / 2; ++j) {
      words[j] = __ldcg(reinterpret_cast<float2 const*>(part.acc + packed * kHeadDim + column) + j);
    }
    if (i == 0) {
      fold = state;
      CUTE_UNROLL
      for (int j = 0; j < kColumns / 2; ++j) {
        acc[2 * j] = words[j].x;
        acc[2 * j + 1] = words[j].y;
      }
      continue;
    }
    Factors const factors = add_chunk(fold, state);
    CUTE_UNROLL
    for (int j = 0; j < kColumns / 2; ++j) {
      acc[2 * j] = factors.add(acc[2 * j], words[j].x);
      acc[2 * j + 1] = factors.add(acc[2 * j + 1], words[j].y);
    }
  }
  OnlineSoftmax<1> softmax(params.scale_log2, params.power_scale);
  softmax.offset[0] = fold.offset;
  softmax.sum[0] = fold.sum;
  softmax.error[0] = fold.error;
  bool const blind = !row_sees_a_key(sequence, row);
  if (column == 0) *lse_row(params, sequence, index, head, row) = blind ? -INFINITY : softmax.lse(0);
  if (column >= params.head_dim_v) return;
  float const inverse = softmax.inverse(0, head_sink_log2<Element>(params.sinks, head));
  CUTE_UNROLL
  for (int j = 0; j < kColumns; ++j) acc[j] = blind ? 0.f : __fmul_rn(acc[j], inverse);
  auto const from = make_tensor(&acc[0], Layout<Int<kColumns>>{});
  auto to = make_tensor<Element>(Layout<Int<kColumns>>{});
  convert(from, to);
  auto const words = recast<uint32_t>(to);
  CUTE_UNROLL
  for (int j = 0; j < size(words); ++j) {
    reinterpret_cast<uint32_t*>(out_row<Element>(params, sequence, index, head, row) + column)[j] = words(j);
  }
}

template <class Traits>
__global__ void __launch_bounds__(32 * kMergeWarps, 1) merge_kernel(__grid_constant__ Params const params) {
  wait_for_kernel_before();  // which writes the parts
  merge_row<Traits>(params, blockIdx.x, threadIdx.x / 32);
}

}  // namespace flash_cute::sm90::decode::key_chunks
