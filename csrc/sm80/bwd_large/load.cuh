// The order in which the operands pass through the ring: for each query head and each tile of the other side, from the
// last to the first, the chunks of the scores and of dP (with those of this side, where they are not resident), then
// the steps of X. And the statistics of the query rows.
#pragma once

#include "../../core/registers.cuh"
#include "../large/steps.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::bwd_large {

template <class Element>
class Loader {
 public:
  CUTE_DEVICE Loader(Task<Element> const& task, bool left_resident)
      : task_(task), left_resident_(left_resident), tile_(task.others.end - 1) {}

  // `step`: of the scores, or behind them of dP.
  CUTE_DEVICE void load_left_chunk(int step, uint32_t target) const {
    int const product = step >= task_.chunks, chunk = step - (product ? task_.chunks : 0);
    large::load_chunk<kTileRows>(task_.left[product].from(0, 0, chunk * large::kChunk), target, fresh_thread_index());
  }

  // The next step.
  CUTE_DEVICE void operator()(uint32_t stage) {
    if (head_ == task_.heads) return;
    int const first = tile_ * kOtherRows;
    if (step_ < task_.score_steps) {
      int const product = step_ >= task_.chunks, chunk = step_ - (product ? task_.chunks : 0);
      large::Rows<Element> const right = task_.right[product].from(head_, first, chunk * large::kChunk);
      large::load_chunk<kOtherRows>(right, stage, fresh_thread_index());
      if (!left_resident_) load_left_chunk(step_, stage + large::kRightBytes);
    } else {
      int const row = first + (step_ - task_.score_steps) * large::kValueKeys;
      large::load_values(task_.x.from(head_, row, 0), stage, fresh_thread_index());
    }
    if (++step_ < task_.score_steps + large::value_steps(task_.x.rows - first)) return;
    step_ = 0;
    if (--tile_ >= task_.others.begin) return;
    tile_ = task_.others.end - 1;
    ++head_;
  }

 private:
  Task<Element> const& task_;
  bool left_resident_;
  int head_ = 0;  // the next step's
  int tile_;
  int step_ = 0;
};

// Copies the statistics of query rows from `first_row` on; rows behind those of the sequence see no key. A barrier must
// follow, and one must lie between the last use of those before and this.
template <int kRows, class Storage>
CUTE_DEVICE void load_statistics(BwdParams const& params, Storage& smem, int head, int first_row, int thread) {
  static_assert(2 * kRows <= large::kThreads && kRows % 32 == 0);
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

}  // namespace flash_cute::sm80::bwd_large
