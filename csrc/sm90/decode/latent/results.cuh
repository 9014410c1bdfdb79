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
      : params_(params), unit_(unit), smem_(smem), warpgroup_(warpgroup) {
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) state_[i] = RowState::of_nothing();
  }

  // Adds a piece, whose softmax is ended by both warpgroups together.
  template <class Acc>
  CUTE_DEVICE void add(int piece, Softmax& softmax, Acc& acc) {  // (rows, columns)
    RowState of_piece[kRowsOfThread];
    add_sums(softmax, of_piece);
    if (!unit_.has_first()) {
      int const i = piece - unit_.piece_begin;
      store(Part::of_piece<kHeadDimV>(params_, unit_, unit_.bundle, i), acc, of_piece);
      return;
    }
    bool const last = piece + 1 == unit_.piece_end;
    Part const part = Part::of_fold<kHeadDimV>(params_, unit_, unit_.bundle);
    fold(part, piece, of_piece, acc);
    if (last && unit_.has_last()) {
      store_result(acc);
    } else {
      store(part, acc, state_);
    }
  }

 private:
  CUTE_DEVICE static int row_of(int i) { return first_row_of_thread(fresh_thread_index()) + 8 * i; }
  CUTE_DEVICE int first_column() const { return warpgroup_ * kColumns + fresh_thread_index() % 4 * 2; }

  // The maxima are those of all tiles; the sums are added.
  CUTE_DEVICE void add_sums(Softmax& softmax, RowState (&of_piece)[kRowsOfThread]) const {
    softmax.finish();
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) smem_.sums[warpgroup_][row_of(i)] = softmax.sum[i];
    named_sync(kAllConsumers, kConsumers);
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      of_piece[i] = {softmax.max[i], __fadd_rn(smem_.sums[0][row_of(i)], smem_.sums[1][row_of(i)])};
    }
    named_sync(kAllConsumers, kConsumers);  // all have read the sums
  }

  // acc = the fold of the pieces before and acc.
  template <class Acc>
  CUTE_DEVICE void fold(Part const& before, int piece, RowState const (&of_piece)[kRowsOfThread], Acc& acc) {
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      FoldFactors const factors = state_[i].add(of_piece[i], params_.scale_log2);
      bool const loads = piece > 0 && row_of(i) < unit_.rows;
      float const* const source = before.acc + row_of(i) * kHeadDimV + first_column();
      CUTE_UNROLL
      for (int begin = 0; begin < kPairs; begin += kAtOnce) {
        float2 sums[kAtOnce];
        CUTE_UNROLL
        for (int j = 0; j < kAtOnce; ++j) {
          sums[j] = loads ? *reinterpret_cast<float2 const*>(source + 8 * (begin + j)) : float2{0.f, 0.f};
        }
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
  CUTE_DEVICE void store_result(Acc const& acc) const {
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      Row const row = Row::of(params_, unit_, row_of(i));
      if (!row.exists) continue;
      auto const place = ResultRow<Element>::of(params_, unit_.batch, row.head, unit_.sequence.first_row + row.index);
      bool const blind = flash_cute::split_keys::first_seen(params_, unit_.sequence, row.index) >=
                         flash_cute::split_keys::seen_limit(params_, unit_.sequence, row.index);
      float const sink_log2 = head_sink_log2<Element>(params_.sinks, row.head);
      float const inverse = state_[i].inverse(sink_log2, params_.scale_log2);
      int const column = first_column();
      CUTE_UNROLL
      for (int j = 0; j < kPairs; ++j) {
        if (column + 8 * j >= params_.head_dim_v) continue;
        flash_cute::split_keys::store_pair(place.out + column + 8 * j, acc(i, 2 * j), acc(i, 2 * j + 1), inverse, blind);
      }
      if (column == 0) *place.lse = blind ? -INFINITY : state_[i].lse(params_.scale_log2);
    }
  }

  static constexpr int kAtOnce = 8;

  DecodeParams const& params_;
  Unit const& unit_;
  typename Traits::SharedStorage& smem_;
  int warpgroup_;
  RowState state_[kRowsOfThread];  // of the pieces so far, if the unit's first one is among them
};

}  // namespace flash_cute::sm90::decode::latent
