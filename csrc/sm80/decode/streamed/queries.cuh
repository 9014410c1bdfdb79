// The queries of a row tile. Of kFewRows rows a thread has those that its warp multiplies, in registers; those of more
// rows lie in shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "core/split_keys/rows.cuh"
#include "fragments.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::decode::streamed {

using flash_cute::split_keys::Row;

template <class Element>
CUTE_DEVICE Element const* query_row(DecodeParams const& params, Unit const& unit, Row const& row) {
  return static_cast<Element const*>(params.q) + unit.batch * params.q_strides.batch +
         row.head * params.q_strides.head + int64_t{unit.sequence.first_row + row.index} * params.q_strides.row;
}

// Warp w multiplies columns 16 w to 16 w + 15 of each slab.
template <class Traits>
class QueriesInRegisters {
 public:
  using Element = typename Traits::Element;

  CUTE_DEVICE QueriesInRegisters(DecodeParams const& params, Unit const& unit, Element*) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      Row const row = Row::of(params, unit, lane / 4 + 8 * half);
      Element const* const q = query_row<Element>(params, unit, row);
      CUTE_UNROLL
      for (int i = 0; i < 2 * Traits::kKeySlabs; ++i) {
        int const column = i / 2 * kKeyColumns + 16 * warp + i % 2 * 8 + lane % 4 * 2;
        bool const exists = row.exists && column < params.head_dim;
        words_[i / 2][i % 2 * 2 + half] = exists ? *reinterpret_cast<uint32_t const*>(q + column) : 0u;
      }
    }
  }

  // Of a slab; a choice, since registers have no index.
  CUTE_DEVICE void fetch(uint32_t (&a)[4], int slab, int /*row*/, int /*step*/, int /*lane*/) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      a[i] = words_[0][i];
      CUTE_UNROLL
      for (int s = 1; s < Traits::kKeySlabs; ++s) a[i] = slab == s ? words_[s][i] : a[i];
    }
  }

 private:
  uint32_t words_[Traits::kKeySlabs][4];
};

// Rows and columns that do not exist are zeros. What is loaded is there with the first slab.
template <class Traits, int kRows>
class QueriesInShared {
 public:
  using Element = typename Traits::Element;

  // `queries`: (columns / 64, kRows, 64)
  CUTE_DEVICE QueriesInShared(DecodeParams const& params, Unit const& unit, Element* queries) : queries_(queries) {
    constexpr int kRowsAtOnce = kThreads / 8;
    int const vector = threadIdx.x % 8;
    CUTE_UNROLL
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
      int const number = int(threadIdx.x) / 8 + i * kRowsAtOnce;
      Row const row = Row::of(params, unit, number);
      Element const* const q = query_row<Element>(params, unit, row);
      for (int column = 8 * vector; column < params.head_dim + 8 * vector; column += 64) {
        bool const exists = row.exists && column < params.head_dim;
        copy_vector(queries + column / 64 * (64 * kRows) + block_offset(number, vector),
                    exists ? q + column : static_cast<Element const*>(params.q), exists);
      }
    }
  }

  // `step`: of 16 columns in the columns of the warp's group.
  CUTE_DEVICE void fetch(uint32_t (&a)[4], int slab, int row, int step, int lane) const {
    int const column = slab * kKeyColumns + step * 16;
    load_left(a, queries_ + column / 64 * (64 * kRows), row, column % 64 / 8, lane);
  }

 private:
  Element* queries_;
};

}  // namespace flash_cute::sm80::decode::streamed
