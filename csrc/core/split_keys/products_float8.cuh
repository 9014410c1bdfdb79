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

template <class Traits, int kKeys, bool kE5M2, class Queries, class Scores>
CUTE_DEVICE void multiply_qk_float8(Float8 const* k, int first, Queries const& queries,
                                    Scores& tSrS) {  // (MMA, 1, keys / 8)
  typename Traits::Mma mma;
  int const lane = threadIdx.x % 32;
  auto tSrQ = fragment_a<typename Traits::Operand>(mma, Shape<_16, Int<Traits::kHeadDim>>{});  // (MMA, 1, D / 16)
  auto tSrK = fragment_b<typename Traits::Operand>(mma, Shape<Int<kKeys>, _32>{});             // (MMA, keys / 8, 2)
  auto words = recast<uint32_t>(tSrK);                                                         // ((1, 2), keys / 8, 2)
  clear(tSrS);
  CUTE_UNROLL
  for (int d = 0; d < Traits::kHeadDim; d += 32) {
    CUTE_UNROLL
    for (int n = 0; n < kKeys; n += 16) {  // four matrices: two of 8 keys, each of 16 and 16 columns
      uint32_t bytes[4];
      int const key = first + n + lane / 16 * 8 + lane % 8;
      load_matrices(float8_bytes<Traits::kTileKeys, Traits::kChunkK>(k, key, d + lane / 8 % 2 * 16), bytes);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        words(make_coord(_0{}, 0), n / 8 + i / 2, i % 2) = float16_pair<kE5M2>(bytes[i]);
        words(make_coord(_0{}, 1), n / 8 + i / 2, i % 2) = float16_pair<kE5M2>(bytes[i] >> 16);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      queries.fetch(tSrQ, d / 16 + i);
      cute::gemm(mma, tSrQ(_, _, d / 16 + i), tSrK(_, _, i), tSrS);
    }
  }
}

template <class Traits, int kKeys, bool kE5M2, class FragP, class Accumulator>
CUTE_DEVICE void multiply_pv_float8(Float8 const* v, int first, KeysThatExist const& exist,
                                    FragP const& tOrP,    // (MMA, 1, keys / 16)
                                    Accumulator& tOrO) {  // (MMA, 1, D / 8)
  typename Traits::Mma mma;
  int const lane = threadIdx.x % 32;
  auto tOrV = fragment_b<typename Traits::Operand>(mma, Shape<_32, _16>{});  // (MMA, 32 columns / 8, 1)
  auto words = recast<uint32_t>(tOrV);                                       // ((1, 2), 4, 1)
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tOrP); ++k) {
    int const key = first + 16 * k;
    CUTE_UNROLL
    for (int d = 0; d < Traits::kHeadDimV; d += 32) {  // four matrices: two of 16 columns, each of 8 and 8 keys
      uint32_t bytes[4];
      load_transposed(float8_bytes<Traits::kTileKeys, Traits::kChunkV>(v, key + lane % 16, d + lane / 16 * 16), bytes);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (!exist.all) bytes[i] &= exist.bits(key + i % 2 * 8 + 2 * (lane % 4));
        uint32_t const apart = __byte_perm(bytes[i], 0, 0x3120);  // two keys' even column, then their odd one
        words(make_coord(_0{}, i % 2), i / 2 * 2, _0{}) = float16_pair<kE5M2>(apart);
        words(make_coord(_0{}, i % 2), i / 2 * 2 + 1, _0{}) = float16_pair<kE5M2>(apart >> 16);
      }
      CUTE_UNROLL
      for (int n = 0; n < 4; ++n) {
        cute::gemm(mma, tOrP(_, _0{}, k), tOrV(_, n, _0{}), tOrO(_, _0{}, d / 8 + n));
      }
    }
  }
}

}  // namespace flash_cute::split_keys
