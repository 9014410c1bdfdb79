// The statistics of a group: the largest |x|, in all or by column, or, with a mean, the largest and the least x by
// column, which the blocks raise in any order; and for a mean the sums by column, which each block writes, and the CTA
// that is the last to have done so adds, always in the same order. What is not finite does not count.
#pragma once

#include "core/fp8.cuh"
#include "rows.cuh"

namespace flash_cute::quantize {

constexpr float kLargestFloat = 0x1.fffffep127f;
constexpr float kInfinity = __builtin_huge_valf();

template <int kLanes>
struct Shared {
  static constexpr int kWidth = kLanes * kColumns;
  union {
    float by_warp[kThreads<kLanes> / 32][kWidth];
    double by_slot[8][kWidth];
    float of_warps[kThreads<kLanes> / 32];
  };
  int ticket;
  int tickets;   // in all
  int ahead;     // the tickets that come first, all for statistics
  int by_turns;  // those that follow them, by turns for statistics and for writing; the rest is for writing
  bool is_last;
};

// What a descale is, of values of which the largest has the size `amax`. A normal number, whose inverse is one too.
CUTE_DEVICE float descale_of(float amax, bool is_e5m2) {
  if (!(amax > 0)) return 1.0f;
  return fmaxf(__fdiv_rn(fminf(amax, kLargestFloat), largest_fp8(is_e5m2)), 0x1p-126f);
}

// The largest x >= 0 of all threads, for each of them.
template <int kLanes>
CUTE_DEVICE float max_of_threads(float x, Shared<kLanes>& shared) {
  constexpr int kWarps = kThreads<kLanes> / 32;
  unsigned const own = __reduce_max_sync(0xffffffff, __float_as_uint(x));
  __syncthreads();  // the buffer may be in use
  if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = __uint_as_float(own);
  __syncthreads();
  float most = 0;
  CUTE_UNROLL
  for (int warp = 0; warp < kWarps; ++warp) most = fmaxf(most, shared.of_warps[warp]);
  return most;
}

// Numbers in the order of floats; 0 is below them all, and stands for -inf.
CUTE_DEVICE unsigned to_key(float x) {
  unsigned const bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
CUTE_DEVICE float from_key(unsigned key) {
  if (key == 0) return -kInfinity;
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

struct ColumnStatistics {
  float sum[kColumns];
  float high[kColumns];  // the largest x, without a mean the largest |x|
  float low[kColumns];
};

CUTE_DEVICE bool is_finite(ColumnStatistics const& statistics, bool centers) {
  bool finite = true;
  CUTE_UNROLL
  for (int column = 0; column < kColumns; ++column) {
    // A value that is not finite makes the sum so. A sum that overflows is no harm: the values are looked at again.
    finite &= fabsf(centers ? statistics.sum[column] : statistics.high[column]) < kInfinity;
  }
  return finite;
}

// Of a thread's rows, half of them at a time: registers for all of them spilled.
template <bool kRotates, class Element, int kLanes>
CUTE_DEVICE ColumnStatistics column_statistics(Params const& params, Block const& at, Place<kLanes> const& place) {
  bool const centers = params.centers;
  ColumnStatistics own;
  // Values are asked one by one whether they are finite only where some are not.
  CUTE_NO_UNROLL
  for (int filters = 0; filters < 2; ++filters) {
    CUTE_UNROLL
    for (int column = 0; column < kColumns; ++column) {
      own.sum[column] = 0;
      own.high[column] = centers ? -kInfinity : 0;
      own.low[column] = kInfinity;
    }
    CUTE_NO_UNROLL
    for (int first = 0; first < at.rows; first += kBlockRows / 2) {
      Vector<Element> rows[kRows / 2];
      load_rows<false>(rows, first, params, at, place);
      CUTE_UNROLL
      for (int i = 0; i < kRows / 2; ++i) {
        Values values = unpack(rows[i]);
        if constexpr (kRotates) {
          if (params.hadamard > 0) rotate(values, params, place.lane);
        }
        if (first + place.first_row + i * kRowStep >= at.rows) continue;
        CUTE_UNROLL
        for (int column = 0; column < kColumns; ++column) {
          float const x = values.at[column];
          if (filters && !(fabsf(x) < kInfinity)) continue;
          if (centers) {
            own.sum[column] = __fadd_rn(own.sum[column], x);
            own.high[column] = fmaxf(own.high[column], x);
            own.low[column] = fminf(own.low[column], x);
          } else {
            own.high[column] = fmaxf(own.high[column], fabsf(x));  // which leaves out NaN
          }
        }
      }
    }
    if (__all_sync(0xffffffff, is_finite(own, centers))) break;
  }
  return own;
}

// Combines the rows of all threads by column; of column threadIdx.x, if there is one.
template <int kLanes, class Op>
CUTE_DEVICE float combine_threads(float const (&own)[kColumns], Shared<kLanes>& shared, Op op) {
  constexpr int kWarps = kThreads<kLanes> / 32;
  Place<kLanes> const place;
  __syncthreads();  // the buffer may be in use
  CUTE_UNROLL
  for (int column = 0; column < kColumns; ++column) {
    float x = own[column];
    CUTE_UNROLL
    for (int distance = kLanes; distance < 32; distance *= 2) x = op(x, __shfl_xor_sync(0xffffffff, x, distance));
    if (threadIdx.x % 32 < kLanes) shared.by_warp[threadIdx.x / 32][place.column + column] = x;
  }
  __syncthreads();
  int const column = min(static_cast<int>(threadIdx.x), Shared<kLanes>::kWidth - 1);
  float total = shared.by_warp[0][column];
  CUTE_UNROLL
  for (int warp = 1; warp < kWarps; ++warp) total = op(total, shared.by_warp[warp][column]);
  return total;
}

// Adds what the blocks of a group have written; of column threadIdx.x, if there is one.
template <int kLanes>
CUTE_DEVICE double add_blocks(Params const& params, Block const& at, Shared<kLanes>& shared) {
  constexpr int kSlots = 8, kThreadsOfSlot = 2 * kLanes;  // which take 4 columns each
  int const slot = threadIdx.x / kThreadsOfSlot, column = threadIdx.x % kThreadsOfSlot * 4;
  int64_t const stride = params.head_dim;
  float const* const first = params.partials + at.group_begin * stride + column;
  double total[4] = {};
  if (column < params.head_dim) {
#pragma unroll 8  // so that as many loads are under way
    for (int block = slot; block < at.group_tasks; block += kSlots) {
      float4 const part = __ldcg(reinterpret_cast<float4 const*>(first + block * stride));
      total[0] += part.x;
      total[1] += part.y;
      total[2] += part.z;
      total[3] += part.w;
    }
  }
  __syncthreads();  // the buffer may be in use
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) shared.by_slot[slot][column + i] = total[i];
  __syncthreads();
  double all = 0;
  if (threadIdx.x < Shared<kLanes>::kWidth) {
    CUTE_UNROLL
    for (int i = 0; i < kSlots; ++i) all += shared.by_slot[i][threadIdx.x];
  }
  return all;
}

// The group's mean and, per head, its descale. By the CTA that is the last to have a block's statistics.
template <int kLanes>
CUTE_DEVICE void finish_group(Params const& params, Block const& at, Shared<kLanes>& shared) {
  bool const is_column = threadIdx.x < params.head_dim;
  float mean = static_cast<float>(add_blocks(params, at, shared) / at.length);
  if (!(fabsf(mean) < kInfinity)) mean = 0;  // sums of float32 that overflowed
  if (is_column) params.mean[int64_t{at.group} * params.head_dim + threadIdx.x] = mean;
  if (params.per != Per::kHead) return;
  float own = 0;
  if (is_column) {
    unsigned const* const limits = params.amax + int64_t{at.group} * params.amax_width + threadIdx.x;
    float const high = from_key(__ldcg(limits)), low = -from_key(__ldcg(limits + params.head_dim));
    // Subtracting is monotonic, so that this is the largest |x - mean| as it is computed; of no finite x it is -inf.
    own = fmaxf(0, fmaxf(__fsub_rn(high, mean), __fsub_rn(mean, low)));
  }
  float const amax = max_of_threads(own, shared);
  if (threadIdx.x == 0) params.descale[at.group] = descale_of(amax, params.is_e5m2);
}

// Of a block, for the mean, and those of its group if it is the last.
template <int kLanes>
CUTE_DEVICE void add_to_mean(ColumnStatistics const& own, Params const& params, Block const& at, int task,
                             Shared<kLanes>& shared) {
  bool const is_column = threadIdx.x < params.head_dim;
  float const sum = combine_threads(own.sum, shared, [](float a, float b) { return __fadd_rn(a, b); });
  if (is_column) params.partials[int64_t{task} * params.head_dim + threadIdx.x] = sum;
  if (params.per == Per::kHead) {
    float const high = combine_threads(own.high, shared, [](float a, float b) { return fmaxf(a, b); });
    float const low = combine_threads(own.low, shared, [](float a, float b) { return fminf(a, b); });
    unsigned* const limits = params.amax + int64_t{at.group} * params.amax_width + threadIdx.x;
    if (is_column) atomicMax(limits, to_key(high));
    if (is_column) atomicMax(limits + params.head_dim, to_key(-low));
  }
  __threadfence();  // what this thread has written is seen by whom thread 0 tells of it
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.is_last = atomicAdd(params.arrived + at.group, 1) + 1 == at.group_tasks;
    __threadfence();
  }
  __syncthreads();
  if (!shared.is_last) return;
  finish_group(params, at, shared);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(params.arrived + at.group, 1);  // one more than there are tasks: it is finished
}

// Of a block, without a mean: raises the largest |x| of its group.
template <int kLanes>
CUTE_DEVICE void raise_amax(ColumnStatistics const& own, Params const& params, Block const& at,
                            Shared<kLanes>& shared) {
  auto const largest = [](float a, float b) { return fmaxf(a, b); };
  if (params.per == Per::kChannel) {
    float const most = combine_threads(own.high, shared, largest);
    if (threadIdx.x < params.head_dim) {
      atomicMax(params.amax + int64_t{at.group} * params.amax_width + threadIdx.x, __float_as_uint(most));
      __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(params.arrived + at.group, 1);
    return;
  }
  float most = 0;
  CUTE_UNROLL
  for (float const x : own.high) most = fmaxf(most, x);
  most = max_of_threads(most, shared);
  if (threadIdx.x == 0) {
    atomicMax(params.amax + at.group, __float_as_uint(most));
    __threadfence();
    atomicAdd(params.arrived + at.group, 1);
  }
}

template <bool kRotates, class Element, int kLanes>
CUTE_DEVICE void take_statistics(Params const& params, int task, Shared<kLanes>& shared) {
  Block const at = find_block(params, task);
  if (at.is_unused) return;
  ColumnStatistics const own = column_statistics<kRotates, Element>(params, at, Place<kLanes>{});
  if (params.centers) {
    add_to_mean(own, params, at, task, shared);
  } else {
    raise_amax(own, params, at, shared);
  }
}

// Waits until the statistics of the block's group are there.
CUTE_DEVICE void wait_for_group(Params const& params, Block const& at) {
  if (threadIdx.x == 0) {
    int const expected = at.group_tasks + (params.centers ? 1 : 0);
    while (static_cast<int>(atomicAdd(params.arrived + at.group, 0)) != expected) __nanosleep(100);
    __threadfence();
  }
  __syncthreads();
}

}  // namespace flash_cute::quantize
