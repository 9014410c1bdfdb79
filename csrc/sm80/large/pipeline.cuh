// The ring of stages through which the operands of the products pass by cp.async, and the copies into it.
#pragma once

#include <cute/tensor.hpp>

#include "shared.cuh"
#include "tile.h"

namespace flash_cute::sm80::large {

// One barrier per step. After advance() the data of the step and of the next one are readable, so that fragments of the
// next step can be loaded before its barrier; the stage of the step before is being filled.
class Pipeline {
 public:
  // `ring`: address of the first stage.
  CUTE_DEVICE Pipeline(uint32_t ring, Ring const& shape)
      : ring_(ring), stage_bytes_(shape.stage_bytes()), stages_(shape.stages), stage_(shape.stages - 1) {}

  // load(address) starts the copies of the next step whose data are not on their way yet, or does nothing after the
  // last one. What the caller has copied before is complete with the first step.
  template <class Load>
  CUTE_DEVICE void start(Load&& load) {
    for (int stage = 0; stage < stages_ - 1; ++stage) {
      load(ring_ + stage * stage_bytes_);
      cp_async_fence();
    }
  }

  template <class Load>
  CUTE_DEVICE void advance(Load&& load) {
    wait_for_next_step();  // this thread's copies of this step and the next one have landed
    __syncthreads();       // those of all threads have; and all have finished reading the step before
    uint32_t const freed = current();
    stage_ = following();
    load(freed);
    cp_async_fence();
  }

  CUTE_DEVICE uint32_t current() const { return ring_ + stage_ * stage_bytes_; }
  CUTE_DEVICE uint32_t next() const { return ring_ + following() * stage_bytes_; }

 private:
  CUTE_DEVICE int following() const { return stage_ + 1 == stages_ ? 0 : stage_ + 1; }

  // stages - 1 steps are on their way, of which two must have arrived.
  CUTE_DEVICE void wait_for_next_step() const {
    static_assert(kMinStages == 3 && kMaxStages == 6);
    switch (stages_) {
      case 3: return cp_async_wait<0>();
      case 4: return cp_async_wait<1>();
      case 5: return cp_async_wait<2>();
      default: return cp_async_wait<3>();
    }
  }

  uint32_t ring_;
  int stage_bytes_;
  int stages_;
  int stage_;  // of the step
};

// One head of a tensor, from a tile's first row on: (rows, head dim).
template <class Element>
struct Rows {
  Element const* first;
  int64_t stride;  // in elements
  int rows;        // beyond them and beyond the columns, zeros are filled in, and nothing is read
  int columns;

  CUTE_DEVICE Rows from(int row, int column) const {
    return {first + row * stride + column, stride, rows - row, columns - column};
  }
};

// Starts the copy of a tile of kRows rows and 64 columns. By all threads.
template <int kRows, class Element>
CUTE_DEVICE void load_chunk(Rows<Element> const& source, uint32_t target, int thread) {
  constexpr int kRowsAtOnce = kThreads / 8;
  static_assert(kRows % kRowsAtOnce == 0);
  int const row = thread / 8, vector = thread % 8;
  Element const* from = source.first + row * source.stride + 8 * vector;
  target += vector_offset(row, vector);
  bool const column_inside = 8 * vector < source.columns;
  CUTE_UNROLL
  for (int i = 0; i < kRows; i += kRowsAtOnce) {
    copy_async(target + i * kRowBytes, from, column_inside && row + i < source.rows);
    from += kRowsAtOnce * source.stride;
  }
}

// Starts the copy of kValueKeys rows and up to kColumns columns, as tiles of 64 columns. Tiles without a column inside
// are left as they are.
template <class Element>
CUTE_DEVICE void load_values(Rows<Element> const& source, uint32_t target, int thread) {
  constexpr int kTilesAtOnce = kThreads / (8 * kValueKeys);
  int const row = thread / 8 % kValueKeys, vector = thread % 8;
  int const column = thread / (8 * kValueKeys) * 64;
  Element const* from = source.first + row * source.stride + column + 8 * vector;
  target += vector_offset(row, vector) + column / 64 * kValueKeys * kRowBytes;
  CUTE_UNROLL
  for (int i = 0; i < kColumns / 64; i += kTilesAtOnce) {
    if (column + 64 * i >= source.columns) break;
    bool const inside = row < source.rows && column + 64 * i + 8 * vector < source.columns;
    copy_async(target + i * kValueKeys * kRowBytes, from + 64 * i, inside);
  }
}

// Writes tiles that store_out has stored: rows below `rows` and columns below `columns`. By all threads.
template <class Element>
CUTE_DEVICE void write_rows(Element* target, int64_t stride, uint32_t tiles, int rows, int columns, int thread) {
  constexpr int kRowsAtOnce = kThreads / 8;
  int const first_row = thread / 8, vector = thread % 8;
  CUTE_UNROLL
  for (int i = 0; i < kBlockM; i += kRowsAtOnce) {
    int const row = first_row + i;
    if (row >= rows) break;
    Element* const to = target + row * stride + 8 * vector;
    for (int column = 0; column + 8 * vector < columns; column += 64) {
      uint32_t const from = tiles + column / 64 * kBlockM * kRowBytes + vector_offset(row, vector);
      *reinterpret_cast<uint4*>(to + column) = load_shared_vector(from);
    }
  }
}

}  // namespace flash_cute::sm80::large
