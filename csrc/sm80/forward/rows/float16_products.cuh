// The two products of the mainloop with float16 accumulators, which GeForce chips multiply twice as fast. Both leave
// float32 results. What float16's range and precision ask for:
//
//   S = Q K^T: the sums over 32 columns alone are float16; they are added to S in float32. Q is multiplied by a power
//   of two of at most `scale`, which is exact, so that the sums are no larger than the scores are. Sums beyond 65504
//   saturate, so that finite inputs never make the softmax compute inf - inf.
//   O = P V: the sums of one key tile alone are float16; they are added to O in float32. P is at most 1 (the softmax
//   takes the exact maximum in every step), so that these sums are at most kBlockN times the largest value of V. Were
//   all of O float16, a step's share of it would get lost in the rounding where there are thousands of keys.
#pragma once

#include <cuda_fp16.h>

#include <cute/tensor.hpp>

#include "contract/accumulate.h"
#include "products.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::forward::rows {

// Both elements within float16's finite range; NaN stays.
CUTE_DEVICE __half2 saturate(__half2 x) {
  __half2 const largest = __half2half2(__ushort_as_half(0x7bff));
  return __hmax2_nan(__hmin2_nan(x, largest), __hneg2(largest));
}

template <class Traits, AccumulateIn kAccumulate>
struct Float16Products : Float32Products {
  static constexpr bool kQk = has_float16_qk(kAccumulate), kPv = has_float16_pv(kAccumulate);
  static constexpr bool kScalesQ = kQk;
  static constexpr int kStepsPerSum = 2;  // k steps of 16 columns of Q and K
  using Half = cutlass::half_t;
  using Mma16 = TiledMMA<MMA_Atom<SM80_16x8x16_F16F16F16F16_TN>, Layout<Shape<Int<Traits::kWarps>, _1, _1>>,
                         Tile<Int<16 * Traits::kWarps>, _16, _16>>;

  // The largest power of two that is at most scale, within float16's normal numbers.
  CUTE_DEVICE static float q_factor(float scale_log2) {
    constexpr float kLn2 = 0.693147180559945f;
    float const power = __uint_as_float(__float_as_uint(scale_log2 * kLn2) & 0x7f800000u);
    return fminf(fmaxf(power, 0x1p-14f), 0x1p15f);
  }

  template <int kRows, PowerScale kPowerScale>
  CUTE_DEVICE static auto make_softmax(float scale_log2, float power_scale) {
    constexpr bool kLazy = !kPv && OnlineSoftmax<kRows>::kLazy;
    float const factor = kQk ? q_factor(scale_log2) : 1.f;
    return OnlineSoftmax<kRows, kLazy, kPowerScale>(scale_log2 / factor, power_scale / factor);
  }

  // Multiplies the part of Q by its factor that this thread has copied to shared memory.
  template <class Smem>
  CUTE_DEVICE static void scale_q(float scale_log2, Smem const& sQ) {  // (BLK_M, D)
    typename Traits::GmemLoad gmem_load;
    auto tQsQ = gmem_load.get_slice(threadIdx.x).partition_D(sQ);  // (CPY, CPY_M, CPY_D)
    __half2 const factor = __float2half2_rn(q_factor(scale_log2));
    constexpr int kRows = decltype(size<1>(tQsQ))::value;
    CUTE_UNROLL
    for (int i = 0; i < kRows * size<2>(tQsQ); ++i) {
      using Chunk = cutlass::AlignedArray<__half2, 4, 16>;  // what one copy brings
      static_assert(Traits::kChunk * sizeof(Half) == sizeof(Chunk));
      auto& chunk = *reinterpret_cast<Chunk*>(&tQsQ(_0{}, i % kRows, i / kRows));
      Chunk scaled = chunk;
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) scaled[j] = __hmul2(scaled[j], factor);
      chunk = scaled;
    }
  }

  template <class Mma, class Scores, class FragQ, class FragK, class Fetch>
  CUTE_DEVICE static void multiply_qk(Mma const& mma,
                                      Scores& tSrS,       // (MMA, MMA_M, MMA_N)
                                      FragQ const& tSrQ,  // (MMA, MMA_M, MMA_D)
                                      FragK const& tSrK,  // (MMA, MMA_N, MMA_D)
                                      Fetch const& fetch) {
    if constexpr (!kQk) {
      Float32Products::multiply_qk(mma, tSrS, tSrQ, tSrK, fetch);
    } else {
      constexpr int kSteps = decltype(size<2>(tSrQ))::value;
      static_assert(kSteps % kStepsPerSum == 0);
      clear(tSrS);
      fetch(0);
      CUTE_UNROLL
      for (int k = 0; k < kSteps; k += kStepsPerSum) {
        auto sums = make_tensor_like<Half>(tSrS);  // (MMA, MMA_M, MMA_N)
        clear(sums);
        CUTE_UNROLL
        for (int step = k; step < k + kStepsPerSum; ++step) {
          if (step + 1 < kSteps) fetch(step + 1);
          cute::gemm(Mma16{}, tSrQ(_, _, step), tSrK(_, _, step), sums);
        }
        auto const pairs = recast<__half2>(sums);
        auto scores = recast<float2>(tSrS);
        CUTE_STATIC_ASSERT_V(size(pairs) == size(scores));
        CUTE_UNROLL
        for (int i = 0; i < size(pairs); ++i) {
          float2 const added = __half22float2(saturate(pairs(i)));
          scores(i).x += added.x;
          scores(i).y += added.y;
        }
      }
    }
  }

  template <class Mma, class Acc, class FragP, class FragV, class Fetch>
  CUTE_DEVICE static void multiply_pv(Mma const& mma,
                                      Acc& tOrO,          // (MMA, MMA_M, MMA_D)
                                      FragP const& tOrP,  // (MMA, MMA_M, MMA_N)
                                      FragV const& tOrV,  // (MMA, MMA_D, MMA_N)
                                      Fetch const& fetch) {
    if constexpr (!kPv) {
      Float32Products::multiply_pv(mma, tOrO, tOrP, tOrV, fetch);
    } else {
      // 16 columns of O at a time, which is what one ldmatrix loads of V: few registers hold the sums.
      constexpr int kSteps = decltype(size<2>(tOrP))::value, kColumns = decltype(size<2>(tOrO))::value / 2;
      CUTE_STATIC_ASSERT_V(size<2>(tOrO) == size<1>(tOrV));
      MMA_Atom<SM80_16x8x16_F16F16F16F16_TN> const atom;
      fetch(0, 0);
      CUTE_UNROLL
      for (int d = 0; d < kColumns; ++d) {
        auto sums = make_tensor<Half>(make_layout(make_shape(_4{}, size<1>(tOrO), _2{})));  // (MMA, MMA_M, 2)
        clear(sums);
        CUTE_UNROLL
        for (int k = 0; k < kSteps; ++k) {
          int const next = d * kSteps + k + 1;
          if (next < kColumns * kSteps) fetch(next / kSteps, next % kSteps);
          CUTE_UNROLL
          for (int half = 0; half < 2; ++half) {
            CUTE_UNROLL
            for (int m = 0; m < size<1>(tOrO); ++m) {
              cute::gemm(atom, tOrP(_, m, k), tOrV(_, 2 * d + half, k), sums(_, m, half));
            }
          }
        }
        CUTE_UNROLL
        for (int i = 0; i < size<1>(sums) * 2; ++i) {
          int const m = i / 2, half = i % 2;
          auto const pairs = recast<__half2>(sums(_, m, half));  // (2)
          auto acc = tOrO(_, m, 2 * d + half);                   // (MMA)
          CUTE_UNROLL
          for (int j = 0; j < 2; ++j) {
            float2 const added = __half22float2(pairs(j));
            acc(2 * j) += added.x;
            acc(2 * j + 1) += added.y;
          }
        }
      }
    }
  }
};

// The traits of a kernel that accumulates in float16.
template <class Element, int kHeadDim, TileConfig kTile, Variant kVariant, AccumulateIn kAccumulate>
struct Float16Traits : Traits<Element, kHeadDim, kTile, kVariant> {
  static_assert(std::is_same_v<Element, cutlass::half_t>);
  using Base = Traits<Element, kHeadDim, kTile, kVariant>;
  using Products = Float16Products<Base, kAccumulate>;
  static constexpr bool kRecomputes = Base::kRecomputes || kHeadDim == 192;  // else it spills
  static constexpr bool kRecomputesQ = false, kRereads = false;               // with them it spills
  static constexpr PowerScale kPowerScale =
      kHeadDim == 128 && kAccumulate == AccumulateIn::kFloat16Pv ? PowerScale::kVoted : PowerScale::kGiven;
};

}  // namespace flash_cute::sm80::forward::rows
