// The end of a piece: its fold, or its part; and at the end of a unit the result. A thread has two rows, and of each
// eight columns of its warpgroup two. See contract/decode.h for how the work is cut.
#pragma once

#include <cute/tensor.hpp>

#include "core/split_keys/fold.cuh"
#include "core/split_keys/rows.cuh"
#include "sm90/common/warpgroup.cuh"
#include "softmax.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::latent {

using flash_cute::split_keys::FoldFactors;
using flash_cute::split_keys::Part;
using flash_cute::split_keys::ResultRow;
using flash_cute::split_keys::Row;
using flash_cute::split_keys::RowState;

// Named barriers.
enum Barrier : int {
  kAllConsumers = 1,
  kCleared = 2,      // + warpgroup: rows of its columns of V have been cleared
  kInitialized = 4,  // what thread 0 has written is there
};

template <class Traits>
class Results {
 public:
  using Element = typename Traits::Element;
  static constexpr int kRowsOfThread = Softmax::kRowsOfThread;
  static constexpr int kPairs = kColumns / 8;  // of a row's columns, a thread's

  CUTE_DEVICE Results(DecodeParams const& params, Unit const& unit, typename Traits::SharedStorage& smem, int warpgroup)
      : params_(params), unit_(unit), smem_(smem), warpgroup_(warpgroup) {}

  // Adds a piece, whose softmax is ended by both warpgroups together.
  template <class Acc>
  CUTE_DEVICE void add(int piece, Softmax& softmax, Acc& acc) {  // (rows, columns)
    RowState of_piece[kRowsOfThread], state[kRowsOfThread];
    add_sums(piece, softmax, of_piece, state);
    if (!unit_.has_first()) {
      int const i = piece - unit_.piece_begin;
      store(Part::of_piece<kHeadDimV>(params_, unit_, unit_.bundle, i), acc, of_piece);
      return;
    }
    Part const part = Part::of_fold<kHeadDimV>(params_, unit_, unit_.bundle);
    fold(part, piece, of_piece, state, acc);
    if (piece + 1 == unit_.pieces.count) {
      store_result(acc, state);
    } else {
      store(part, acc, state);
    }
  }

 private:
  CUTE_DEVICE static int row_of(int i) { return first_row_of_thread(fresh_thread_index()) + 8 * i; }
  CUTE_DEVICE int first_column() const { return warpgroup_ * kColumns + fresh_thread_index() % 4 * 2; }

  // The maxima are those of all tiles; the sums are added. `before`: of the pieces before.
  CUTE_DEVICE void add_sums(int piece, Softmax& softmax, RowState (&of_piece)[kRowsOfThread],
                            RowState (&before)[kRowsOfThread]) const {
    softmax.finish();
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) smem_.sums[warpgroup_][row_of(i)] = softmax.sum[i];
    named_sync(kAllConsumers, kConsumers);
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      int const number = row_of(i);
      of_piece[i] = {softmax.max[i], __fadd_rn(smem_.sums[0][number], smem_.sums[1][number])};
      before[i] = piece == 0 ? RowState::of_nothing() : smem_.states[number];
    }
    named_sync(kAllConsumers, kConsumers);  // all have read the sums and the states
  }

  // acc = the fold of the pieces before and acc. Rows that do not exist read those of others.
  template <class Acc>
  CUTE_DEVICE void fold(Part const& before, int piece, RowState const (&of_piece)[kRowsOfThread],
                        RowState (&state)[kRowsOfThread], Acc& acc) {
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      FoldFactors const factors = state[i].add(of_piece[i], params_.scale_log2);
      if (first_column() == 0) smem_.states[row_of(i)] = state[i];
      if (piece == 0) {
        CUTE_UNROLL
        for (int j = 0; j < 2 * kPairs; ++j) acc(i, j) = factors.add(0.f, acc(i, j));
        continue;
      }
      float const* const source = before.acc + min(row_of(i), unit_.rows - 1) * kHeadDimV + first_column();
      CUTE_UNROLL
      for (int begin = 0; begin < kPairs; begin += kAtOnce) {
        float2 sums[kAtOnce];
        CUTE_UNROLL
        for (int j = 0; j < kAtOnce; ++j) sums[j] = *reinterpret_cast<float2 const*>(source + 8 * (begin + j));
        CUTE_UNROLL
        for (int j = 0; j < kAtOnce; ++j) {
          float &x = acc(i, 2 * (begin + j)), &y = acc(i, 2 * (begin + j) + 1);
          x = factors.add(sums[j].x, x);
          y = factors.add(sums[j].y, y);
        }
        asm volatile("" ::: "memory");  // else all loads come first, and spill
      }
    }
  }

  template <class Acc>
  CUTE_DEVICE void store(Part const& part, Acc const& acc, RowState const (&state)[kRowsOfThread]) const {
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      int const number = row_of(i);
      if (number >= unit_.rows) continue;
      float* const target = part.acc + number * kHeadDimV + first_column();
      CUTE_UNROLL
      for (int j = 0; j < kPairs; ++j) *reinterpret_cast<float2*>(target + 8 * j) = {acc(i, 2 * j), acc(i, 2 * j + 1)};
      if (first_column() == 0) {
        part.row_max[number] = state[i].max;
        part.row_sum[number] = state[i].sum;
      }
    }
  }

  template <class Acc>
  CUTE_DEVICE void store_result(Acc const& acc, RowState const (&state)[kRowsOfThread]) const {
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      Row const row = Row::of(params_, unit_, row_of(i));
      if (!row.exists) continue;
      auto const place = ResultRow<Element>::of(params_, unit_.batch, row.head, unit_.sequence.first_row + row.index);
      bool const blind = flash_cute::split_keys::first_seen(params_, unit_.sequence, row.index) >=
                         flash_cute::split_keys::seen_limit(params_, unit_.sequence, row.index);
      float const sink_log2 = head_sink_log2<Element>(params_.sinks, row.head);
      float const inverse = state[i].inverse(sink_log2, params_.scale_log2);
      int const column = first_column();
      CUTE_UNROLL
      for (int j = 0; j < kPairs; ++j) {
        if (column + 8 * j >= params_.head_dim_v) continue;
        flash_cute::split_keys::store_pair(place.out + column + 8 * j, acc(i, 2 * j), acc(i, 2 * j + 1), inverse,
                                           blind);
      }
      if (column == 0) *place.lse = blind ? -INFINITY : state[i].lse(params_.scale_log2);
    }
  }

  static constexpr int kAtOnce = 32;

  DecodeParams const& params_;
  Unit const& unit_;
  typename Traits::SharedStorage& smem_;
  int warpgroup_;
};

}  // namespace flash_cute::sm90::decode::latent
