// The order in which the operands pass through the ring: for each query head and each tile of the other side, from the
// last to the first, the chunks of the scores and of dP (with those of this side, where they are not resident), then
// the steps of X. Of a tile whose W the partner computes, X alone. And the statistics of the query rows.
#pragma once

#include "core/registers.cuh"
#include "sm80/streaming/steps.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::backward::streamed {

template <class Traits, Side kSide>
class Loader {
 public:
  using Element = typename Traits::Element;

  CUTE_DEVICE Loader(typename Traits::Storage const& smem, bool left_resident)
      : task_(smem.task), left_resident_(left_resident), turns_(smem) {
    begin_turn();
  }

  // All chunks of this side, of the scores and then of dP.
  CUTE_DEVICE void load_left(uint32_t target) const {
    for (int step = 0; step < task_.score_steps;) {
      Cursor rows = Cursor::of_chunks(task_.left[step >= task_.chunks].from(0, 0, 0), fresh_thread_index());
      int const end = step < task_.chunks ? task_.chunks : task_.score_steps;
      for (; step < end; ++step, target += streaming::kLeftBytes) rows.template load_chunk<kTileRows>(target);
    }
  }

  // The next step.
  CUTE_DEVICE void operator()(uint32_t stage) {
    if (steps_ == 0) return;
    if (product_ == kX) {
      others_.load_values(stage);
    } else {
      if (left_resident_) {
        others_.template load_chunk<kOtherRows>(stage);
      } else {
        others_.template load_chunks<kOtherRows, kTileRows>(stage, rows_, task_.left[product_].row_stride,
                                                            stage + streaming::kRightBytes);
      }
    }
    if (--steps_ == 0) begin_next_product();
  }

 private:
  using Cursor = streaming::Cursor<Element>;
  static constexpr int kX = 2;  // behind the scores, 0, and dP, 1

  CUTE_DEVICE void begin_turn() {
    if (!turns_.has_tile()) turns_.advance();  // the last turn of a CTA of a pair may have none
    if (turns_.has_tile()) begin_product(turns_.is_own() ? 0 : kX);
  }
  CUTE_DEVICE void begin_product(int product) {
    int const first = turns_.tile() * kOtherRows, head = turns_.head();
    product_ = product;
    if (product == kX) {
      others_ = Cursor::of_values(task_.x.from(head, first, 0), fresh_thread_index());
      steps_ = streaming::value_steps(task_.x.rows - first);
    } else {
      others_ = Cursor::of_chunks(task_.right[product].from(head, first, 0), fresh_thread_index());
      if (!left_resident_) {
        rows_ = streaming::OwnRows<Element>::of(task_.left[product].from(0, 0, 0), fresh_thread_index());
      }
      steps_ = product == 0 ? task_.chunks : task_.score_steps - task_.chunks;
    }
  }
  CUTE_DEVICE void begin_next_product() {
    if (product_ == kX) {
      if (turns_.advance()) begin_turn();
    } else {
      begin_product(product_ == 0 && task_.needs_dp() ? 1 : kX);
    }
  }

  Task<Element> const& task_;
  bool left_resident_;
  // The next step's:
  typename Traits::template Turns<kSide> turns_;
  int product_;
  int steps_ = 0;  // with it, of the product; 0: there is no next step
  Cursor others_;  // the right operand, or X
  streaming::OwnRows<Element> rows_;  // the left one, where it is not resident
};

// Copies the statistics of query rows from `first_row` on; rows behind those of the sequence see no key. A barrier must
// follow, and one must lie between the last use of those before and this.
template <int kRows, class Storage>
CUTE_DEVICE void load_statistics(BwdParams const& params, Storage& smem, int head, int first_row, int thread) {
  static_assert(2 * kRows <= streaming::kThreads && kRows % 32 == 0);
  if (thread >= 2 * kRows) return;
  bool const is_delta = thread >= kRows;
  int const row = is_delta ? thread - kRows : thread;
  int64_t const first = int64_t{head} * params.m_blocks * kTileRows + smem.task.first_statistic + first_row;
  bool const inside = first_row + row < smem.task.sequence.len_q;
  if (is_delta) {
    smem.delta[row] = inside ? params.delta[first + row] : 0.f;
  } else {
    smem.lse_log2[row] = inside ? params.lse_log2[first + row] : INFINITY;
  }
}

}  // namespace flash_cute::sm80::backward::streamed
