// The two products of a key tile, by one warp: S = Q K^T and O += P V.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "traits.cuh"

namespace flash_cute::split_keys {

// The fragments of Q, in registers: (MMA, 1, D / 16).
template <class Fragment>
struct QueriesInRegisters {
  Fragment& tSrQ;
  CUTE_DEVICE void fetch(Fragment& tSrQ_step, int k) const { copy(tSrQ(_, _, k), tSrQ_step(_, _, k)); }
};

// In shared memory a lane has the 16 bytes of a k step side by side.
CUTE_DEVICE uint4& shared_queries(char* q, int k) {  // q: of the warp
  return reinterpret_cast<uint4*>(q)[32 * k + threadIdx.x % 32];
}
struct QueriesInShared {
  char* q;
  template <class Fragment>
  CUTE_DEVICE void fetch(Fragment& tSrQ_step, int k) const {
    uint4 const words = shared_queries(q, k);
    auto fragment = recast<uint32_t>(tSrQ_step(_, _0{}, k));  // (4)
    fragment(0) = words.x;
    fragment(1) = words.y;
    fragment(2) = words.z;
    fragment(3) = words.w;
  }
};

struct NothingBeside {
  CUTE_DEVICE void operator()(int) const {}
};

// Of the kKeys keys of a tile from `first` on. `beside(Int<d>)` is called in each step of 16 columns: what it issues
// runs while the step's MMAs wait for those of the step before.
template <class Traits, int kKeys, class Queries, class Scores, class Beside = NothingBeside>
CUTE_DEVICE void multiply_qk(typename Traits::Cache const* k, int first, Queries const& queries,
                             Scores& tSrS,  // (MMA, 1, keys / 8)
                             Beside const& beside = {}) {
  typename Traits::Mma mma;
  int const lane = threadIdx.x % 32;
  auto sK_tile = make_tensor(make_smem_ptr(k), typename Traits::SmemLayoutK{});  // (tile, D)
  auto sK = local_tile(sK_tile, Shape<Int<kKeys>, Int<Traits::kHeadDim>>{}, make_coord(first / kKeys, _0{}));
  auto tSrK = fragment_b<typename Traits::Operand>(mma, Shape<Int<kKeys>, Int<Traits::kHeadDim>>{});
  auto const copy_k = make_tiled_copy_B(typename Traits::SmemCopyAtom{}, mma);
  auto tSsK = copy_k.get_slice(lane).partition_S(sK);       // (CPY, CPY_N, CPY_D)
  auto tSrK_copy = copy_k.get_slice(_0{}).retile_D(tSrK);   // (CPY, CPY_N, CPY_D)
  CUTE_STATIC_ASSERT_V(size<1>(tSsK) == size<1>(tSrK_copy) && size<2>(tSsK) == size<2>(tSrK_copy));
  auto tSrQ = fragment_a<typename Traits::Operand>(mma, Shape<_16, Int<Traits::kHeadDim>>{});  // (MMA, 1, D / 16)
  constexpr int kSteps = Traits::kHeadDim / 16;
  clear(tSrS);
  auto const fetch = [&](int d) {
    queries.fetch(tSrQ, d);
    copy(copy_k, tSsK(_, _, d), tSrK_copy(_, _, d));
  };
  fetch(0);
  for_each(make_seq<kSteps>{}, [&](auto d) {
    if constexpr (d + 1 < kSteps) fetch(d + 1);  // a step ahead of its MMA
    cute::gemm(mma, tSrQ(_, _, d), tSrK(_, _, d), tSrS);
    beside(d);
  });
}

// Which keys of a tile exist: V's other rows may be anything in memory, or nothing that was loaded.
struct KeysThatExist {
  int begin;  // in the tile
  int end;
  bool all;

  // Of a register with 16 bits of `key` and 16 of the next one, the bits of those that exist.
  CUTE_DEVICE uint32_t bits(int key) const {
    return (key >= begin && key < end ? 0x0000ffffu : 0u) | (key + 1 >= begin && key + 1 < end ? 0xffff0000u : 0u);
  }
};

// The same, of a lane's registers of kKeys keys of a tile from `first` on.
template <int kKeys>
struct BitsThatExist {
  uint32_t bits[kKeys / 16][2];

  CUTE_DEVICE static BitsThatExist of(KeysThatExist const& exist, int first) {
    BitsThatExist result;
    CUTE_UNROLL
    for (int k = 0; k < kKeys / 16; ++k) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        result.bits[k][i] = exist.bits(first + 16 * k + 8 * i + 2 * int(threadIdx.x % 4));
      }
    }
    return result;
  }
};

// The product of V's rows, of the kKeys keys of a tile from `first` on, in steps of 16 keys and 16 columns each.
template <class Traits, int kKeys>
struct ProductPV {
  static constexpr int kColumnSteps = Traits::kHeadDimV / 16, kSteps = kKeys / 16 * kColumnSteps;

  // `mask(words, k)`: clears the bits of keys that do not exist, in two registers of the lane's of key step k.
  template <int kStep, class Mask, class FragP, class Accumulator>
  CUTE_DEVICE static void step(typename Traits::Cache const* v, int first, Mask const& mask,
                               FragP const& tOrP,    // (MMA, 1, keys / 16)
                               Accumulator& tOrO) {  // (MMA, 1, D / 8)
    constexpr int k = kStep / kColumnSteps, c = kStep % kColumnSteps;
    typename Traits::Mma mma;
    auto sVt_tile = make_tensor(make_smem_ptr(v), typename Traits::SmemLayoutVt{});  // (D, tile)
    auto sVt = local_tile(sVt_tile, Shape<Int<Traits::kHeadDimV>, Int<kKeys>>{}, make_coord(_0{}, first / kKeys));
    auto tOrV = fragment_b<typename Traits::Operand>(mma, Shape<Int<Traits::kHeadDimV>, Int<kKeys>>{});
    auto const copy_v = make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, mma);
    auto tOsV = copy_v.get_slice(threadIdx.x % 32).partition_S(sVt);  // (CPY, CPY_D, CPY_N)
    auto tOrV_copy = copy_v.get_slice(_0{}).retile_D(tOrV);           // (CPY, CPY_D, CPY_N)
    CUTE_STATIC_ASSERT_V(size<1>(tOsV) == size<1>(tOrV_copy) && size<2>(tOsV) == size<2>(tOrV_copy));
    CUTE_STATIC_ASSERT_V(size<2>(tOrO) == Int<2>{} * size<1>(tOrV_copy));  // a copy has 16 columns
    copy(copy_v, tOsV(_, c, k), tOrV_copy(_, c, k));
    CUTE_UNROLL
    for (int d = 2 * c; d < 2 * c + 2; ++d) {
      auto words = recast<uint32_t>(tOrV(_, d, k));  // (2): of pairs of keys
      mask(words, k);
      cute::gemm(mma, tOrP(_, _0{}, k), tOrV(_, d, k), tOrO(_, _0{}, d));
    }
  }
};

template <class Traits, int kKeys, class FragP, class Accumulator>
CUTE_DEVICE void multiply_pv(typename Traits::Cache const* v, int first, KeysThatExist const& exist,
                             FragP const& tOrP,    // (MMA, 1, keys / 16)
                             Accumulator& tOrO) {  // (MMA, 1, D / 8)
  auto const mask = [&](auto& words, int k) {
    if (exist.all) return;
    int const key = first + 16 * k + 2 * int(threadIdx.x % 4);
    words(_0{}) &= exist.bits(key);
    words(_1{}) &= exist.bits(key + 8);
  };
  for_each(make_seq<ProductPV<Traits, kKeys>::kSteps>{}, [&](auto i) {
    ProductPV<Traits, kKeys>::template step<i>(v, first, mask, tOrP, tOrO);
  });
}

// Calls step(Int<i>) for the kSteps steps of one product that fall to step d of the kOthers of another.
template <int kSteps, int kOthers, class D, class Step>
CUTE_DEVICE void steps_beside(D, Step const& step) {
  constexpr int d = D::value;
  for_each(make_range<d * kSteps / kOthers, (d + 1) * kSteps / kOthers>{}, step);
}

// Both products beside each other: O += P V of a tile, and S of the next one.
template <class Traits, int kKeys, class FragP, class Accumulator, class Queries, class Scores>
CUTE_DEVICE void multiply_pv_and_next_qk(typename Traits::Cache const* v, typename Traits::Cache const* k, int first,
                                         KeysThatExist const& exist,
                                         FragP const& tOrP,  // (MMA, 1, keys / 16)
                                         Accumulator& tOrO,  // (MMA, 1, D / 8)
                                         Queries const& queries,
                                         Scores& tSrS) {  // (MMA, 1, keys / 8)
  auto const existing = BitsThatExist<kKeys>::of(exist, first);
  auto const mask = [&](auto& words, int k) {
    words(_0{}) &= existing.bits[k][0];
    words(_1{}) &= existing.bits[k][1];
  };
  using Product = ProductPV<Traits, kKeys>;
  multiply_qk<Traits, kKeys>(k, first, queries, tSrS, [&](auto d) {
    steps_beside<Product::kSteps, Traits::kHeadDim / 16>(
        d, [&](auto i) { Product::template step<i>(v, first, mask, tOrP, tOrO); });
  });
}

}  // namespace flash_cute::split_keys
