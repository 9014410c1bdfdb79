// A sequence of the batch, as the kernels that take packed batches see it: where its rows and keys are, and its mask.
#pragma once

#include <cute/tensor.hpp>

#include "mask.cuh"

namespace flash_cute {

using namespace cute;

// Has the members that the functions of mask.cuh read.
struct Sequence {
  int len_q;
  int len_k;
  Band band;
  int shift;      // row i has the position i + shift
  int first_row;  // of q and out, in their row dimension
  int first_key;  // of k and v
  int rows;       // of out and the LSE that are written: those from len_q on are not used, and see no key
};

// The number of rows that are written. (For dense batches the functions below take the parameters themselves.)
CUTE_HOST_DEVICE int written_rows(FwdParams const& params) { return params.len_q; }
CUTE_HOST_DEVICE int written_rows(Sequence const& sequence) { return sequence.rows; }

CUTE_HOST_DEVICE bool row_sees_a_key(Sequence const& sequence, int row) {
  return row < sequence.len_q && first_column(sequence, row) < column_limit(sequence, row);
}

// The band of a window around each row's position. A limit that affects no row is dropped, as the host does it.
CUTE_HOST_DEVICE Band window_band(int left, int right, int shift, int len_q, int len_k) {
  auto const limited = [](int64_t limit) {
    return static_cast<int>(max(int64_t{-kNoLimit}, min(limit, int64_t{kNoLimit})));
  };
  int64_t const lower = int64_t{shift} - left, upper = int64_t{shift} + right;
  bool const has_lower = left < kNoLimit && lower + len_q - 1 > 0;
  bool const has_upper = right < kNoLimit && upper < len_k - 1;
  return {.lower = has_lower ? limited(lower) : -kNoLimit, .upper = has_upper ? limited(upper) : kNoLimit};
}

// The rows, or keys, of a sequence in its tensor: [first, first + length), of which the first `used` are used.
struct Extent {
  int first;
  int length;
  int used;
};

// Offsets count as ascending: one that is smaller than an offset before it counts as that one. So sequences never
// overlap, whatever the offsets are, every row is in one, and there is never more work than the host has planned.
// The floor of a sequence is the largest of the offsets up to its own first one.
struct Floors {
  int rows;
  int keys;
};

// An offset, which cannot make a kernel leave the tensors.
CUTE_DEVICE int read_offset(int const* cu, int total, int index) { return max(0, min(cu[index], total)); }

// The offset that counts for the floor of sequence `index`: the last two, see below, begin with the first and the last.
CUTE_DEVICE int read_begin(int const* cu, int total, int batch, int index) {
  return cu == nullptr ? 0 : read_offset(cu, total, min(index, batch));
}
template <class Params>
CUTE_DEVICE int row_begin(Params const& params, int index) {
  return read_begin(params.sequences.cu_q, params.len_q, params.batch, index);
}
template <class Params>
CUTE_DEVICE int key_begin(Params const& params, int index) {
  return read_begin(params.sequences.cu_k, params.len_k, params.batch, index);
}

// Whatever `cu` and `used` hold, the extent lies in [0, total). Sequences `batch` and `batch` + 1 of a packed batch are
// the rows before the first one and those behind the last one, which nobody uses.
CUTE_DEVICE Extent read_extent(Sequences const& all, int const* cu, int const* used, int total, int batch, int index,
                               int floor) {
  if (cu == nullptr) return {0, total, total};
  if (index == batch) return {0, all.has_before ? 0 : read_offset(cu, total, 0), 0};
  int const first = max(floor, read_offset(cu, total, min(index, batch)));
  if (index > batch) return {first, all.has_behind ? 0 : total - first, 0};
  int const length = max(first, read_offset(cu, total, index + 1)) - first;
  return {first, length, used == nullptr ? length : max(0, min(used[index], length))};
}

template <class Params>
CUTE_DEVICE Extent row_extent(Params const& params, int index, int floor) {
  Sequences const& all = params.sequences;
  return read_extent(all, all.cu_q, all.used_q, params.len_q, params.batch, index, floor);
}
template <class Params>
CUTE_DEVICE Extent key_extent(Params const& params, int index, int floor) {
  Sequences const& all = params.sequences;
  return read_extent(all, all.cu_k, all.used_k, params.len_k, params.batch, index, floor);
}

// The sequences to be worked on, with the two of a packed batch that nobody uses.
template <class Params>
CUTE_DEVICE int sequence_count(Params const& params) {
  return params.sequences.cu_q == nullptr ? params.batch : params.batch + 2;
}

template <class Params>
CUTE_DEVICE Sequence read_sequence(Params const& params, int index, Floors const& floors) {
  Sequences const& all = params.sequences;
  Extent const rows = row_extent(params, index, floors.rows), keys = key_extent(params, index, floors.keys);
  int const shift = all.cu_q == nullptr ? all.shift : all.bottom_right ? keys.used - rows.used : 0;
  return {.len_q = rows.used,
          .len_k = keys.used,
          .band = window_band(all.window_left, all.window_right, shift, rows.used, keys.used),
          .shift = shift,
          .first_row = rows.first,
          .first_key = keys.first,
          .rows = rows.length};
}

}  // namespace flash_cute
