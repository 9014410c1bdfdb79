// The two products where the cache is of float8. Its numbers become float16 in registers, without error; two
// neighbouring ones are one 16-bit element of the ldmatrix that loads them. So a thread has four neighbouring columns
// of K where it would have two pairs, and Q's columns are in that order (load_queries); and of V the even and the odd
// columns come apart, as those of O do (Columns).
#pragma once

#include "core/fp8.cuh"
#include "products.cuh"

namespace flash_cute::split_keys {

// The 16 bytes from `column` on of a row of a tile, as TMA has swizzled them.
template <int kTileKeys, int kChunk>
CUTE_DEVICE void const* float8_bytes(Float8 const* tile, int row, int column) {
  static_assert(kChunk == 128 || kChunk == 64);
  int const offset = column / kChunk * (kTileKeys * kChunk) + row * kChunk + column % kChunk;
  return tile + (offset ^ (offset >> 7 & (kChunk == 128 ? 7 : 3)) << 4);
}

CUTE_DEVICE void load_matrices(void const* bytes, uint32_t (&words)[4]) {
  SM75_U32x4_LDSM_N::copy(*static_cast<uint128_t const*>(bytes), words[0], words[1], words[2], words[3]);
}
CUTE_DEVICE void load_transposed(void const* bytes, uint32_t (&words)[4]) {
  SM75_U16x8_LDSM_T::copy(*static_cast<uint128_t const*>(bytes), words[0], words[1], words[2], words[3]);
}

// cute::for_each has a lambda of its own, which nvcc does not always inline: a call keeps the fragments in memory.
template <int... kSteps, class F>
CUTE_DEVICE void for_each_inlined(std::integer_sequence<int, kSteps...>, F const& f) {
  (f(Int<kSteps>{}), ...);
}

// See multiply_qk; a step has 32 columns.
template <class Traits, int kKeys, bool kE5M2, class Queries, class Scores, class Beside = NothingBeside>
CUTE_DEVICE void multiply_qk_float8(Float8 const* k, int first, Queries const& queries,
                                    Scores& tSrS,  // (MMA, 1, keys / 8)
                                    Beside const& beside = {}) {
  typename Traits::Mma mma;
  int const lane = threadIdx.x % 32;
  auto tSrQ = fragment_a<typename Traits::Operand>(mma, Shape<_16, Int<Traits::kHeadDim>>{});  // (MMA, 1, D / 16)
  auto tSrK = fragment_b<typename Traits::Operand>(mma, Shape<Int<kKeys>, _32>{});             // (MMA, keys / 8, 2)
  auto words = recast<uint32_t>(tSrK);                                                         // ((1, 2), keys / 8, 2)
  constexpr int kSteps = Traits::kHeadDim / 32;
  uint32_t bytes[2][kKeys / 16][4];  // of a step and of the next one
  auto const fetch = [&](auto d) {
    CUTE_UNROLL
    for (int n = 0; n < kKeys; n += 16) {  // four matrices: two of 8 keys, each of 16 and 16 columns
      int const key = first + n + lane / 16 * 8 + lane % 8, column = 32 * d + lane / 8 % 2 * 16;
      load_matrices(float8_bytes<Traits::kTileKeys, Traits::kChunkK>(k, key, column), bytes[d % 2][n / 16]);
    }
  };
  clear(tSrS);
  fetch(Int<0>{});
  for_each_inlined(make_seq<kSteps>{}, [&](auto d) __attribute__((always_inline)) {
    if constexpr (d + 1 < kSteps) fetch(d + Int<1>{});  // a step ahead of its MMA
    CUTE_UNROLL
    for (int n = 0; n < kKeys / 16; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        words(make_coord(_0{}, 0), 2 * n + i / 2, i % 2) = float16_pair<kE5M2>(bytes[d % 2][n][i]);
        words(make_coord(_0{}, 1), 2 * n + i / 2, i % 2) = float16_pair<kE5M2, 1>(bytes[d % 2][n][i]);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      queries.fetch(tSrQ, 2 * d + i);
      cute::gemm(mma, tSrQ(_, _, 2 * d + i), tSrK(_, _, i), tSrS);
    }
    beside(d);
  });
}

// See ProductPV; a step has 16 keys and 32 columns.
template <class Traits, int kKeys, bool kE5M2>
struct ProductPVFloat8 {
  static constexpr int kColumnSteps = Traits::kHeadDimV / 32, kSteps = kKeys / 16 * kColumnSteps;

  // `mask(bytes, k)`: clears the bits of keys that do not exist, in four registers of the lane's of key step k.
  template <int kStep, class Mask, class FragP, class Accumulator>
  CUTE_DEVICE static void step(Float8 const* v, int first, Mask const& mask,
                               FragP const& tOrP,    // (MMA, 1, keys / 16)
                               Accumulator& tOrO) {  // (MMA, 1, D / 8)
    constexpr int k = kStep / kColumnSteps, d = kStep % kColumnSteps * 32;
    typename Traits::Mma mma;
    int const lane = threadIdx.x % 32, key = first + 16 * k + lane % 16;
    auto tOrV = fragment_b<typename Traits::Operand>(mma, Shape<_32, _16>{});  // (MMA, 32 columns / 8, 1)
    auto words = recast<uint32_t>(tOrV);                                       // ((1, 2), 4, 1)
    uint32_t bytes[4];  // four matrices: two of 16 columns, each of 8 and 8 keys
    load_transposed(float8_bytes<Traits::kTileKeys, Traits::kChunkV>(v, key, d + lane / 16 * 16), bytes);
    mask(bytes, k);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t const apart = __byte_perm(bytes[i], 0, 0x3120);  // two keys' even column, then their odd one
      words(make_coord(_0{}, i % 2), i / 2 * 2, _0{}) = float16_pair<kE5M2>(apart);
      words(make_coord(_0{}, i % 2), i / 2 * 2 + 1, _0{}) = float16_pair<kE5M2, 1>(apart);
    }
    CUTE_UNROLL
    for (int n = 0; n < 4; ++n) {
      cute::gemm(mma, tOrP(_, _0{}, k), tOrV(_, n, _0{}), tOrO(_, _0{}, d / 8 + n));
    }
  }
};

template <class Traits, int kKeys, bool kE5M2, class FragP, class Accumulator>
CUTE_DEVICE void multiply_pv_float8(Float8 const* v, int first, KeysThatExist const& exist,
                                    FragP const& tOrP,    // (MMA, 1, keys / 16)
                                    Accumulator& tOrO) {  // (MMA, 1, D / 8)
  auto const mask = [&](uint32_t(&bytes)[4], int k) {
    if (exist.all) return;
    int const key = first + 16 * k + 2 * int(threadIdx.x % 4);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) bytes[i] &= exist.bits(key + i % 2 * 8);
  };
  using Product = ProductPVFloat8<Traits, kKeys, kE5M2>;
  for_each(make_seq<Product::kSteps>{}, [&](auto i) { Product::template step<i>(v, first, mask, tOrP, tOrO); });
}

// See multiply_pv_and_next_qk.
template <class Traits, int kKeys, bool kE5M2K, bool kE5M2V, class FragP, class Accumulator, class Queries,
          class Scores>
CUTE_DEVICE void multiply_pv_and_next_qk_float8(Float8 const* v, Float8 const* k, int first,
                                                KeysThatExist const& exist,
                                                FragP const& tOrP,  // (MMA, 1, keys / 16)
                                                Accumulator& tOrO,  // (MMA, 1, D / 8)
                                                Queries const& queries,
                                                Scores& tSrS) {  // (MMA, 1, keys / 8)
  auto const existing = BitsThatExist<kKeys>::of(exist, first);
  auto const mask = [&](uint32_t(&bytes)[4], int step) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) bytes[i] &= existing.bits[step][i % 2];
  };
  using Product = ProductPVFloat8<Traits, kKeys, kE5M2V>;
  multiply_qk_float8<Traits, kKeys, kE5M2K>(k, first, queries, tSrS, [&](auto d) {
    steps_beside<Product::kSteps, Traits::kHeadDim / 32>(
        d, [&](auto i) { Product::template step<i>(v, first, mask, tOrP, tOrO); });
  });
}

}  // namespace flash_cute::split_keys
