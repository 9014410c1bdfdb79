// The elementwise part of a backward step: P^T and dS^T in the fragments of the transposed scores, (keys, rows).
#pragma once

#include <type_traits>

#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "core/convert.cuh"
#include "core/registers.cuh"
#include "core/softmax.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::backward {

using namespace cute;

// The order of row statistics in the workspace. In S^T thread q of a quad has columns 2q, 2q + 1, 8 + 2q and 9 + 2q of
// every 16 (columns of S^T are rows): this order stores them side by side, so that a thread reads four statistics as
// one float4.
struct StatOrder {
  CUTE_HOST_DEVICE static constexpr int position(int row) {
    int const quad = row % 8 / 2, eight = row % 16 / 8, odd = row % 2;
    return row / 16 * 16 + quad * 4 + eight * 2 + odd;
  }
};

// The index among the consumers' threads, reread at each use: nothing derived from it stays in registers, of which the
// accumulators leave few.
CUTE_DEVICE int consumer_thread() { return fresh_thread_index() - 128; }

// A statistic of this thread's rows, of kRows per tile. Read before the wait for a GEMM, which hides the latency.
template <int kRows>
struct RowStats {
  float4 fours[kRows / 16];

  RowStats() = default;
  CUTE_DEVICE explicit RowStats(float const* stat) {
    int const lane = fresh_lane_index();
    CUTE_UNROLL
    for (int i = 0; i < kRows / 16; ++i) fours[i] = reinterpret_cast<float4 const*>(stat)[4 * i + lane % 4];
  }

  // Reads the i-th four alone.
  CUTE_DEVICE void read(float const* stat, int i) {
    fours[i] = reinterpret_cast<float4 const*>(stat)[4 * i + fresh_lane_index() % 4];
  }
};

// S^T to P^T. `scores` is (keys, rows). `before_four(j)` is called before the scores of the j-th four rows.
template <class Scores, int kRows, class BeforeFour>
CUTE_DEVICE void exponentiate(Scores& scores, RowStats<kRows> const& lse_log2, float scale_log2,
                              BeforeFour const& before_four) {
  static_assert(decltype(size<1>(scores))::value * 4 == kRows);
  CUTE_UNROLL
  for (int j = 0; j < kRows / 4; j += 4) {
    before_four(j / 4);
    float4 const lse = lse_log2.fours[j / 4];
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
      scores(i, j) = exp2_approx(scores(i, j) * scale_log2 - lse.x);
      scores(i, j + 1) = exp2_approx(scores(i, j + 1) * scale_log2 - lse.y);
      scores(i, j + 2) = exp2_approx(scores(i, j + 2) * scale_log2 - lse.z);
      scores(i, j + 3) = exp2_approx(scores(i, j + 3) * scale_log2 - lse.w);
    }
  }
}

template <class Scores, int kRows>
CUTE_DEVICE void exponentiate(Scores& scores, RowStats<kRows> const& lse_log2, float scale_log2) {
  exponentiate(scores, lse_log2, scale_log2, [](int) {});
}

// Sets dP^T to -delta: a product that is added to it makes dP^T - delta of it. `dscores` is (keys, rows).
template <class Scores, int kRows>
CUTE_DEVICE void set_to_negative(Scores&& dscores, RowStats<kRows> const& stats) {
  static_assert(decltype(size<1>(dscores))::value * 4 == kRows);
  CUTE_UNROLL
  for (int j = 0; j < kRows / 4; j += 4) {
    float4 const delta = stats.fours[j / 4];
    CUTE_UNROLL
    for (int i = 0; i < size<0>(dscores); ++i) {
      dscores(i, j) = -delta.x;
      dscores(i, j + 1) = -delta.y;
      dscores(i, j + 2) = -delta.z;
      dscores(i, j + 3) = -delta.w;
    }
  }
}

// dP^T to dP^T - delta. `dscores` is (keys, rows).
template <class Scores, int kRows>
CUTE_DEVICE void subtract(Scores& dscores, RowStats<kRows> const& stats) {
  static_assert(decltype(size<1>(dscores))::value * 4 == kRows);
  CUTE_UNROLL
  for (int j = 0; j < kRows / 4; j += 4) {
    float4 const delta = stats.fours[j / 4];
    CUTE_UNROLL
    for (int i = 0; i < size<0>(dscores); ++i) {
      dscores(i, j) -= delta.x;
      dscores(i, j + 1) -= delta.y;
      dscores(i, j + 2) -= delta.z;
      dscores(i, j + 3) -= delta.w;
    }
  }
}

// dP^T - delta to dS^T, its product with P^T, in a share of a fragment's columns.
template <Share kShare = Share{}, class Fragment>
CUTE_DEVICE void differentiate(Fragment const& tSrP, Fragment& tSrdP) {  // (MMA, MMA_N, MMA_M)
  static_assert(std::is_same_v<typename Fragment::value_type, float>);   // rounded, P would add an error to dQ and dK
  constexpr int kSize = decltype(size(tSrdP))::value / kShare.of;
  CUTE_UNROLL
  for (int i = kShare.index * kSize; i < (kShare.index + 1) * kSize; ++i) tSrdP(i) *= tSrP(i);
}

// Converts a share of a fragment's columns.
template <Share kShare, class From, class To>
CUTE_DEVICE void convert_share(From const& from, To& to) {  // both (MMA, MMA_N, MMA_M)
  CUTE_STATIC_ASSERT_V(size(from) == size(to));
  static_assert(decltype(size(from))::value % kShare.of == 0);
  constexpr int kSize = decltype(size(from))::value / kShare.of;
  auto from_share = make_tensor(from.data() + kShare.index * kSize, Shape<Int<kSize>>{});  // (elements)
  auto to_share = make_tensor(to.data() + kShare.index * kSize, Shape<Int<kSize>>{});      // (elements)
  convert(from_share, to_share);
}

// The shared-memory address that this thread passes to STSM for the first 16 columns of dS^T: 16 bytes, one key's row
// of one of four 8 x 8 matrices. CuTe's copy would recompute it in each step, in 45 instructions.
template <class SmemLayoutSt, class Element>
CUTE_DEVICE uint32_t ds_address(Element const* ds) {
  int const thread = consumer_thread();
  int const key = thread / 32 * 16 + thread % 16, row = thread % 32 / 16 * 8;
  int const offset = SmemLayoutSt{}.layout_b()(key, row, 0) * int(sizeof(Element));
  return cast_smem_ptr_to_uint(ds) + Swizzle<3, 4, 3>{}(offset);
}

// Stores a share of dS^T's columns in shared memory; `address` is that of ds_address. The next 16 columns are 32 bytes
// further, which under the swizzle is an exclusive or; the next 64 columns are a chunk further.
template <class Traits, Share kShare, class Fragment>
CUTE_DEVICE void store_ds(uint32_t address, Fragment const& rdS) {  // (MMA, MMA_N, MMA_M)
  using Element = typename Traits::Element;
  constexpr uint32_t kChunkBytes =
      Traits::kBlockM == 64 ? 0 : sizeof(Element) * typename Traits::SmemLayoutSt{}.layout_b()(0, 64, 0);
  auto const words = recast<uint32_t>(rdS);  // (MMA / 2, MMA_N, MMA_M)
  static_assert(decltype(size(words))::value % (4 * kShare.of) == 0);
  constexpr int kStores = decltype(size(words))::value / 4 / kShare.of;
  CUTE_UNROLL
  for (int i = kShare.index * kStores; i < (kShare.index + 1) * kStores; ++i) {
    asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     (address ^ (i % 4 * 32)) + i / 4 * kChunkBytes),
                 "r"(words(4 * i)), "r"(words(4 * i + 1)), "r"(words(4 * i + 2)), "r"(words(4 * i + 3))
                 : "memory");
  }
}

}  // namespace flash_cute::sm90::backward
