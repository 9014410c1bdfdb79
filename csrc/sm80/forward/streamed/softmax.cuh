// Online softmax over rows that four warps share; see core/softmax.cuh for the lazy maximum and the rounding errors.
//
// The maxima in use are in shared memory, since the accumulators leave few registers. A thread compares its own scores
// with the limit of the maximum in use, and the barrier behind the scores tells all threads whether one of them exceeds
// it: only then, in few tiles of a row, the warps exchange their maxima. Sums and rounding errors are exchanged once,
// at the end.
#pragma once

#include "core/layout.cuh"
#include "core/sink.cuh"
#include "core/softmax.cuh"
#include "pair.cuh"
#include "tile_mask.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::forward::streamed {

template <class Traits>
class Softmax {
 public:
  static constexpr int kRows = 4;  // of scores, per thread
  static constexpr float kLag = 8.f;
  using Storage = typename Traits::Storage;

  CUTE_DEVICE explicit Softmax(FwdParams const& params) : params_(params) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      own_max_[i] = -INFINITY;
      sum_[i] = 0.f;
    }
  }

  // Of the shared state, before the first tile; a barrier must follow.
  CUTE_DEVICE static void clear(Storage& smem, int thread) {
    if (thread >= Traits::kBlockM) return;
    smem.offset[thread] = -FLT_MAX;
    smem.limit[thread] = -INFINITY;
  }

  // Turns raw scores into numerators, and rescales the sums and the accumulator where rows take a new maximum.
  template <class Scores, class Out>
  CUTE_DEVICE void update(Storage& smem,
                          Scores& scores,  // (rows, keys)
                          Out& out,        // (rows, columns)
                          int thread) {
    static_assert(decltype(size<0>(scores))::value == kRows);
    bool grown = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) own_max_[i] = fmaxf(own_max_[i], scores(i, j));
      grown |= own_max_[i] > smem.limit[score_row(i, thread)];
    }
    if (__syncthreads_or(grown)) raise_maxima(smem, out, thread);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const offset = smem.offset[score_row(i, thread)], scale = row_scale(offset);
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) = exp2_approx(scores(i, j) * scale - offset);
        sum_[i] += scores(i, j);
      }
    }
  }

  // The maxima in use, for the partner.
  CUTE_DEVICE static void send_maxima(Storage const& smem, Message& message, int thread) {
    if (thread >= Traits::kBlockM) return;
    message.statistics[0][thread] = smem.offset[thread];
    message.statistics[1][thread] = smem.limit[thread];
  }

  // Takes the partner's maxima where they are larger; false: nowhere do they differ. Then smem.other_factor rescales
  // the partner's numerators.
  template <class Out>
  CUTE_DEVICE bool merge_maxima(Storage& smem, Message const& message,
                                Out& out,  // (rows, columns)
                                int thread) {
    bool differs = false;
    if (thread < Traits::kBlockM) {
      float const own = smem.offset[thread], other = __ldcg(&message.statistics[0][thread]);
      float const offset = fmaxf(own, other);
      differs = own != other;
      smem.factor[thread] = exp2_approx(own - offset);
      smem.other_factor[thread] = exp2_approx(other - offset);
      smem.offset[thread] = offset;
      if (other > own) smem.limit[thread] = __ldcg(&message.statistics[1][thread]);
    }
    if (!__syncthreads_or(differs)) return false;
    rescale(smem, out, thread);
    return true;
  }

  // The row sums and, per row, what normalizes it: negative for rows that see no key. Stores the LSE where `lse`, which
  // points to the sequence's row 0, is not null. A barrier ends it.
  CUTE_DEVICE void finish(Storage& smem, typename Traits::Partner& pair, float* lse, int thread) {
    using Element = typename Traits::Element;
    auto const add = [](float a, float b) { return a + b; };
    int const lane = thread % 32, key_warp = thread / 64;
    CUTE_UNROLL
    for (int i = 0; i < kRows; i += 2) {
      auto const numerator = [&](int row) {
        float const offset = smem.offset[score_row(row, thread)];
        return exp2_approx(own_max_[row] * row_scale(offset) - offset);
      };
      float2 const errors = rounding_errors<Element>(numerator(i), numerator(i + 1));
      float const error[] = {quad_reduce(errors.x, add), quad_reduce(errors.y, add)};
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float const sum = quad_reduce(sum_[i + half], add);
        if (lane % 4 != 0) continue;
        smem.row_max[key_warp][score_row(i + half, thread)] = sum;
        smem.row_error[key_warp][score_row(i + half, thread)] = error[half];
      }
    }
    __syncthreads();  // all sums are there
    float sum = 0.f, error = 0.f;
    if (thread < Traits::kBlockM) {
      CUTE_UNROLL
      for (int warp = 0; warp < Traits::kKeyWarps; ++warp) {
        sum += smem.row_max[warp][thread];
        error += smem.row_error[warp][thread];
      }
    }
    if constexpr (Traits::kPaired) add_partner(pair, sum, error, thread);
    if (thread < Traits::kBlockM) normalize_row(smem, lse, thread, sum, error);
    __syncthreads();  // all factors are
  }

  // The row in the tile of a thread's row of scores, and of a thread's row of out.
  CUTE_DEVICE static int score_row(int i, int thread) {
    return 16 * (thread / 32 % 2) + 32 * (i / 2) + 8 * (i % 2) + thread % 32 / 4;
  }
  CUTE_DEVICE static int out_row(int i, int thread) { return 16 * (i / 2) + 8 * (i % 2) + thread % 32 / 4; }

 private:
  // See OnlineSoftmax.
  static constexpr float kFused = OnlineSoftmax<2>::kFused;
  CUTE_DEVICE float row_scale(float row_offset) const {
    return fabsf(row_offset) > kFused ? params_.power_scale : params_.scale_log2;
  }

  template <class Out>
  CUTE_DEVICE void raise_maxima(Storage& smem, Out& out, int thread) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const row_max = quad_reduce(own_max_[i], [](float a, float b) { return fmaxf(a, b); });
      if (thread % 4 == 0) smem.row_max[thread / 64][score_row(i, thread)] = row_max;
    }
    __syncthreads();  // the maxima of all warps are there
    if (thread < Traits::kBlockM) {
      float row_max = smem.row_max[0][thread];
      CUTE_UNROLL
      for (int warp = 1; warp < Traits::kKeyWarps; ++warp) row_max = fmaxf(row_max, smem.row_max[warp][thread]);
      bool const past = row_max > smem.limit[thread];
      float const old_offset = smem.offset[thread];
      float const product = row_max * params_.scale_log2;
      float const new_offset = past ? row_max * row_scale(product) : old_offset;
      smem.factor[thread] = exp2_approx(old_offset - new_offset);
      smem.offset[thread] = new_offset;
      if (past) {
        float const lag = fabsf(product) > kFused ? 0.f : kLag * reciprocal(params_.scale_log2);
        smem.limit[thread] = row_max + lag;
      }
    }
    __syncthreads();  // the new state is there; it is written again after the next tile's barriers
    rescale(smem, out, thread);
  }

  // The partner's sums are added; both CTAs add in the same order.
  CUTE_DEVICE static void add_partner(Pair& pair, float& sum, float& error, int thread) {
    if (thread < Traits::kBlockM) {
      pair.own().statistics[0][thread] = sum;
      pair.own().statistics[1][thread] = error;
    }
    pair.send(thread);
    pair.wait(thread);
    if (thread >= Traits::kBlockM) return;
    sum += __ldcg(&pair.other().statistics[0][thread]);
    error += __ldcg(&pair.other().statistics[1][thread]);
  }

  // The sums and the accumulator, by smem.factor.
  template <class Out>
  CUTE_DEVICE void rescale(Storage const& smem, Out& out, int thread) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) sum_[i] *= smem.factor[score_row(i, thread)];
    CUTE_UNROLL
    for (int i = 0; i < size<0>(out); ++i) {
      float const factor = smem.factor[out_row(i, thread)];
      CUTE_UNROLL
      for (int j = 0; j < size<1>(out); ++j) out(i, j) *= factor;
    }
  }

  // By a mask. Asked only of rows whose sum is 0: such a row sees no key, unless all of its scores are -inf.
  CUTE_DEVICE bool sees_a_key(Storage const& smem, int row) const {
    HeadMask const mask = head_mask(params_, smem.tile);
    int const begin = smem.tile.keys.begin * Traits::kBlockN, end = smem.tile.keys.end * Traits::kBlockN;
    for (int column = begin; column < end; ++column) {
      if (mask.sees(row, column)) return true;
    }
    return false;
  }

  CUTE_DEVICE void normalize_row(Storage& smem, float* lse, int tile_row, float sum, float error) {
    forward::SequenceTile const& tile = smem.tile;
    constexpr float kLn2 = 0.693147180559945f;
    float const in_use = smem.offset[tile_row];
    float const offset = fabsf(in_use) > kFused ? in_use / params_.power_scale * params_.scale_log2 : in_use;
    float const sink_log2 = head_sink_log2<typename Traits::Element>(params_.sinks, tile.coord.head);
    int const row = tile.coord.m_block * Traits::kBlockM + tile_row;
    bool const blind =
        has_mask(params_.mask) ? sum == 0.f && !sees_a_key(smem, row) : !row_sees_a_key(tile.sequence, row);
    // A row all of whose scores are -inf gives 0/0 = NaN, as by the definition.
    smem.factor[tile_row] = blind ? -1.f : reciprocal(sum + error + exp2_approx(sink_log2 - offset));
    if (lse == nullptr || row >= tile.sequence.rows) return;
    lse[row] = row >= tile.sequence.len_q || sum == 0.f ? -INFINITY : offset * kLn2 + logf(sum);
  }

  FwdParams const& params_;
  float own_max_[kRows];  // of the raw scores so far, over this thread's keys
  float sum_[kRows];      // of the numerators, over this thread's keys
};

}  // namespace flash_cute::sm80::forward::streamed
