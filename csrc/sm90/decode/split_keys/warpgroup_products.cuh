// The two products of a key tile for 64 rows, by all warps that compute: WGMMA, which reads K and V from shared memory
// once, where four warps with mma.sync read them four times.
//
// A thread has the same elements of S, P and O, in the same order, as with m16n8k16 (SM90::GMMA::CLayout_64xN: warp w
// has the rows 16 w and behind). So the fragments are those of the warps' own products, seen in another layout.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "contract/split_keys.h"
#include "core/layout.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::decode::split_keys {

using flash_cute::split_keys::kConsumerWarps;

template <class Element, int kHeadDim, int kHeadDimV, int kTileKeys>
struct WarpgroupProducts {
  static constexpr int kRows = 64;
  static constexpr auto kK = SM90::GMMA::Major::K;
  static constexpr auto kMN = SM90::GMMA::Major::MN;
  using MmaQK = decltype(make_tiled_mma(
      SM90::GMMA::rs_op_selector<Element, Element, float, Shape<Int<kRows>, Int<kTileKeys>, Int<kHeadDim>>, kK, kK>()));
  using MmaPV = decltype(make_tiled_mma(
      SM90::GMMA::rs_op_selector<Element, Element, float, Shape<Int<kRows>, Int<kHeadDimV>, Int<kTileKeys>>, kK,
                                 kMN>()));
  using SmemLayoutK = decltype(tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<Element>{},
                                             Shape<Int<kTileKeys>, Int<kHeadDim>>{}));
  using SmemLayoutVt = decltype(tile_to_shape(SM90::GMMA::Layout_MN_SW128_Atom<Element>{},
                                              Shape<Int<kHeadDimV>, Int<kTileKeys>>{}, Step<_2, _1>{}));

  template <class FragQ, class Scores>
  CUTE_DEVICE static void multiply_qk(Element const* k, FragQ& tSrQ, Scores& tSrS) {
    MmaQK mma;
    auto q = make_tensor(tSrQ.data(), fragment_a<Element>(mma, Shape<Int<kRows>, Int<kHeadDim>>{}).layout());
    multiply<Accumulate::kOverwrite>(mma, q, make_tensor(make_smem_ptr(k), SmemLayoutK{}), tSrS);
  }

  template <class FragP, class Accumulator>
  CUTE_DEVICE static void multiply_pv(Element const* v, FragP& tOrP, Accumulator& tOrO) {
    MmaPV mma;
    auto p = make_tensor(tOrP.data(), fragment_a<Element>(mma, Shape<Int<kRows>, Int<kTileKeys>>{}).layout());
    multiply<Accumulate::kAdd>(mma, p, make_tensor(make_smem_ptr(v), SmemLayoutVt{}), tOrO);
  }

  // Makes the rows of V outside of [begin, end) zeros: they may be anything, NaN too. By all warps that compute.
  CUTE_DEVICE static void clear_values(Element const* v, int begin, int end) {
    constexpr int kVectors = kTileKeys * kHeadDimV / 8, kOfRow = 8;  // of 16 bytes; rows of a chunk of 64 columns
    auto* const vectors = const_cast<uint4*>(reinterpret_cast<uint4 const*>(v));
    for (int i = threadIdx.x; i < kVectors; i += 32 * kConsumerWarps) {
      int const row = i / kOfRow % kTileKeys;
      if (row < begin || row >= end) vectors[i] = uint4{};
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

 private:
  template <Accumulate kAccumulate, class Mma, class FragA, class TensorB, class Fragment>
  CUTE_DEVICE static void multiply(Mma& mma, FragA& tCrA, TensorB const& sB, Fragment& fragment) {
    constexpr int kColumns = decltype(size<0>(sB))::value;
    auto const tCrB = mma.get_slice(0).partition_fragment_B(sB);
    auto acc = make_tensor(fragment.data(), partition_shape_C(mma, Shape<Int<kRows>, Int<kColumns>>{}));
    issue_gemm<kAccumulate>(mma, tCrA, tCrB, acc);
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
  }
};

}  // namespace flash_cute::sm90::decode::split_keys
