// The ring of stages through which the operands of the products pass by cp.async, and the copies into it.
#pragma once

#include <cute/tensor.hpp>

#include "shared.cuh"
#include "tile.h"

namespace flash_cute::sm80::streaming {

// One barrier per step, or, where the ring has enough stages, per two steps. After advance() the data of the step and
// of the next one are readable, so that fragments of the next step can be loaded before its barrier; fill() starts the
// copies into a stage that was read before the last barrier: that of the step before, or of the one before that.
class Pipeline {
 public:
  // `ring`: address of the first stage.
  CUTE_DEVICE Pipeline(uint32_t ring, Ring const& shape)
      : ring_(ring), stage_bytes_(shape.stage_bytes()), stages_(shape.stages), stage_(shape.stages - 1) {}

  // load(address) starts the copies of the next step whose data are not on their way yet, or does nothing after the
  // last one. What the caller has copied before is complete with the first step.
  template <class Load>
  CUTE_DEVICE void start(Load&& load) {
    for (int stage = 0; stage < stages_ - lag(); ++stage) {
      load(ring_ + stage * stage_bytes_);
      cp_async_fence();
    }
  }

  CUTE_DEVICE void advance() {
    wait_for_next_steps();  // this thread's copies of this step and the next one, or the next two, have landed
    __syncthreads();        // those of all threads have; and all have finished reading the step before
    stage_ = following();
  }
  // From a product's first, third, ... step to the one behind it, which may share its barrier.
  CUTE_DEVICE void advance_in_pair() {
    if (lag() == 1) return advance();
    stage_ = following();
  }

  // Once in each step: behind its first products, so that the copies' instructions are issued while the tensor cores
  // work.
  template <class Load>
  CUTE_DEVICE void fill(Load&& load) {
    load(ring_ + (stage_ < lag() ? stage_ + stages_ - lag() : stage_ - lag()) * stage_bytes_);
    cp_async_fence();
  }

  CUTE_DEVICE uint32_t current() const { return ring_ + stage_ * stage_bytes_; }
  CUTE_DEVICE uint32_t next() const { return ring_ + following() * stage_bytes_; }

 private:
  // In steps: fill() fills the stage of the step so many before.
  CUTE_DEVICE int lag() const { return stages_ >= kStagesToSpareBarriers ? 2 : 1; }
  CUTE_DEVICE int following() const { return stage_ + 1 == stages_ ? 0 : stage_ + 1; }

  // stages - lag steps are on their way, of which the first lag + 1 must have arrived.
  CUTE_DEVICE void wait_for_next_steps() const {
    static_assert(kMinStages == 3 && kMaxStages == 8 && kStagesToSpareBarriers >= 6);
    switch (stages_) {
      case 3: return cp_async_wait<0>();
      case 5:
      case 7: return cp_async_wait<2>();
      case 8: return cp_async_wait<3>();
      default: return cp_async_wait<1>();
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

// The CTA's rows, where their chunks pass through the ring beside those of the other operand: a thread's.
template <class Element>
struct OwnRows {
  Element const* from;  // the thread's first vector of the next step
  int rows;             // inside, from the thread's first row on

  CUTE_DEVICE static OwnRows of(Rows<Element> const& source, int thread) {
    int const row = thread / 8, vector = thread % 8;
    return {source.first + row * source.stride + 8 * vector, source.rows - row};
  }
};

// The addresses of a thread's copies from a tensor, step after step of the same kind. A step's copies are a few
// instructions: what depends on the tensor and the tile is computed when the cursor is made.
template <class Element>
struct Cursor {
  Element const* from;  // the thread's first vector of the next step
  int64_t stride;       // in elements: of the rows between the thread's vectors of a chunk; of the rows of a step of X
  int rows;             // inside, from the thread's first row on
  int columns;          // inside, from the thread's first column on
  uint32_t offset;      // of the thread's first vector in a stage

  static constexpr int kRowsAtOnce = kThreads / 8;                  // of a chunk
  static constexpr int kTilesAtOnce = kThreads / (8 * kValueKeys);  // of X

  // For load_chunk: from the source's first chunk on.
  CUTE_DEVICE static Cursor of_chunks(Rows<Element> const& source, int thread) {
    int const row = thread / 8, vector = thread % 8;
    return {.from = source.first + row * source.stride + 8 * vector,
            .stride = kRowsAtOnce * source.stride,
            .rows = source.rows - row,
            .columns = source.columns - 8 * vector,
            .offset = vector_offset(row, vector)};
  }

  // For load_values: from the source's first rows on.
  CUTE_DEVICE static Cursor of_values(Rows<Element> const& source, int thread) {
    int const row = thread / 8 % kValueKeys, vector = thread % 8, tile = thread / (8 * kValueKeys);
    return {.from = source.first + row * source.stride + 64 * tile + 8 * vector,
            .stride = kValueKeys * source.stride,
            .rows = source.rows - row,
            .columns = source.columns - 64 * tile - 8 * vector,
            .offset = vector_offset(row, vector) + tile * kValueKeys * kRowBytes};
  }

  // Starts the copy of a tile of kRows rows and 64 columns. By all threads.
  template <int kRows>
  CUTE_DEVICE void load_chunk(uint32_t target) {
    copy_chunk<kRows>(from, stride, rows, columns > 0, target + offset);
    from += kChunk;
    columns -= kChunk;
  }

  // A chunk of the other operand of a product, and a chunk of this one.
  template <int kRows, int kOwnRows>
  CUTE_DEVICE void load_chunks(uint32_t target, OwnRows<Element>& own, int64_t own_stride, uint32_t own_target) {
    copy_chunk<kOwnRows>(own.from, kRowsAtOnce * own_stride, own.rows, columns > 0, own_target + offset);
    own.from += kChunk;
    load_chunk<kRows>(target);
  }

  // Starts the copy of kValueKeys rows and up to kColumns columns, as tiles of 64 columns. Of a vector behind the last
  // column nothing is written: its products are columns that are not stored.
  CUTE_DEVICE void load_values(uint32_t target) {
    CUTE_UNROLL
    for (int i = 0; i < kColumns / 64; i += kTilesAtOnce) {
      if (columns > 64 * i) copy_async(target + offset + i * kValueKeys * kRowBytes, from + 64 * i, rows > 0);
    }
    from += stride;
    rows -= kValueKeys;
  }

  template <int kRows>
  CUTE_DEVICE static void copy_chunk(Element const* vector, int64_t stride, int rows, bool column_inside,
                                     uint32_t target) {
    static_assert(kRows % kRowsAtOnce == 0);
    CUTE_UNROLL
    for (int i = 0; i < kRows; i += kRowsAtOnce) {
      copy_async(target + i * kRowBytes, vector, column_inside && rows > i);
      vector += stride;
    }
  }
};

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

}  // namespace flash_cute::sm80::streaming
