// TMA of tensors whose sequences are read at run time: what lies past a sequence's end arrives as zeros, although the
// next sequence follows in memory.
//
// TMA compares a coordinate with a size that the map fixes, while the place of a sequence's end is known on the device
// only. So the map of a packed tensor has its rows three times: in `row`, which has kEnd rows, in `last`, which counts
// from the tensor's first row, and in `back`, of which one step is -1 / kEnd rows modulo 2^64. With the coordinates
//     row = kEnd - length + i,   last = first + length,   back = kEnd
// row i of the sequence [first, first + length) is at (row + last - kEnd) rows, as it should, and rows from `length` on
// are outside the map. (Triton's ragged descriptors work the same way.) A dense tensor has the batch as `last`, and
// `row` counts from 0.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/sequence.cuh"
#include "load_tma.cuh"
#include "tensor_map.cuh"

namespace flash_cute::sm90 {

using namespace cute;

// The coordinates of a sequence's row 0.
struct SequenceOrigin {
  static constexpr int kEnd = 1 << 30;

  int row;
  int last;
  int back;

  CUTE_DEVICE static SequenceOrigin packed(int first, int length) { return {kEnd - length, first + length, kEnd}; }
  CUTE_DEVICE static SequenceOrigin dense(int batch) { return {0, batch, 0}; }
};

// The origin of the rows or keys [first, first + length) of a tile's sequence: of those that are used for loads, of all
// for stores.
template <class Params, class Tile>
CUTE_DEVICE SequenceOrigin sequence_origin(Params const& params, Tile const& tile, int first, int length) {
  if (params.sequences.cu_q == nullptr) return SequenceOrigin::dense(tile.batch);
  return SequenceOrigin::packed(first, length);
}

// Loads rows [row, row + rows) of one head of a sequence, all columns.
template <class Columns>
CUTE_DEVICE void load_tile(CUtensorMap const& map, uint64_t* full, TMA::CacheHintSm90 hint,
                           typename Columns::Element* smem, int rows, int row, int head, SequenceOrigin const& origin) {
  constexpr int kChunk = Columns::kChunk;
  CUTE_UNROLL
  for (int chunk = 0; chunk < Columns::kChunks; ++chunk) {
    SM90_TMA_LOAD_5D::copy(&map, full, static_cast<uint64_t>(hint), smem + chunk * rows * kChunk, chunk * kChunk,
                           origin.row + row, head, origin.last, origin.back);
  }
}

// Stores such a tile. Rows that the sequence does not have are not written.
template <class Columns>
CUTE_DEVICE void store_tile(CUtensorMap const& map, typename Columns::Element const* smem, int rows, int row, int head,
                            SequenceOrigin const& origin) {
  constexpr int kChunk = Columns::kChunk;
  CUTE_UNROLL
  for (int chunk = 0; chunk < Columns::kChunks; ++chunk) {
    SM90_TMA_STORE_5D::copy(&map, smem + chunk * rows * kChunk, chunk * kChunk, origin.row + row, head, origin.last,
                            origin.back);
  }
}

// Encodes the map (column, row, head, last, back). `sizes`: columns, rows, heads and batch of the tensor; a packed one
// has no batch.
template <class Element>
cudaError_t encode_sequence_map(CUtensorMap* map, void const* data, Strides strides, std::array<int, 4> const& sizes,
                                bool packed, Box box) {
  uint64_t const row_pitch = pitch<Element>(sizes[1], strides.row);
  uint64_t const head_pitch = pitch<Element>(sizes[2], strides.head);
  if (!packed) {
    return encode_map<Element, 5>(
        map, data, {uint64_t(sizes[0]), uint64_t(sizes[1]), uint64_t(sizes[2]), uint64_t(sizes[3]), 1},
        {row_pitch, head_pitch, pitch<Element>(sizes[3], strides.batch), 16}, box);
  }
  constexpr uint64_t kEnd = SequenceOrigin::kEnd;
  return encode_map<Element, 5>(map, data, {uint64_t(sizes[0]), kEnd, uint64_t(sizes[2]), 2 * kEnd, kEnd + 1},
                                {row_pitch, head_pitch, row_pitch, (uint64_t{1} << 34) - row_pitch}, box);
}

// The map of a kernel's place: (column, row, head, batch), or that of sequences that are read at run time.
template <class Element, bool kReadsSequences>
cudaError_t encode_place_map(CUtensorMap* map, void const* data, Strides strides, std::array<int, 4> const& sizes,
                             bool packed, Box box) {
  if constexpr (kReadsSequences) {
    return encode_sequence_map<Element>(map, data, strides, sizes, packed, box);
  } else {
    return encode_map<Element>(map, data, strides, sizes, box);
  }
}

}  // namespace flash_cute::sm90
