// The mask by bits (RowBits in contract/tile_mask.h), applied to the scores of a tile.
#pragma once

#include <cute/tensor.hpp>

#include "contract/tile_mask.h"
#include "mask.cuh"

namespace flash_cute {

// The bits of 16 rows and a tile's columns, spread over the lanes of the warp that has the rows: a word is two
// neighbouring columns, the first one in its low half. Lane l has the pairs of columns l, l + 32 and so on. A column's
// 64 rows are thus read as four warps need them, and a lane gets those of its columns by shuffles.
template <int kColumns>
struct WarpBits {
  static constexpr int kPairs = kColumns / 2;
  static constexpr int kWords = (kPairs + 31) / 32;
  static_assert(kColumns % 8 == 0 && kBitRows == 64);
  uint32_t words[kWords];

  // `bits`: of the tile's columns and 64 rows, of which the warp's begin at `first_row`, a multiple of 16.
  CUTE_DEVICE void read(RowBits const* bits, int first_row, int lane) {
    uint16_t const* const rows = reinterpret_cast<uint16_t const*>(bits) + first_row / 16;  // of column 0
    CUTE_UNROLL
    for (int w = 0; w < kWords; ++w) {
      // Behind the last pair there may be no memory.
      int const pair = kPairs % 32 == 0 ? 32 * w + lane : min(32 * w + lane, kPairs - 1);
      words[w] = rows[8 * pair] | uint32_t{rows[8 * pair + 4]} << 16;
    }
  }

  // Sets the scores that the bits hide to -inf, in two of the thread's rows: `first` and the next one, of which the
  // thread of lane l has rows l / 4 and l / 4 + 8 of the warp's. By whole warps.
  template <class Scores, class Coords0>
  CUTE_DEVICE void hide(Scores& scores,         // (rows, columns)
                        Coords0 const& tScS_0,  // (rows, columns) -> (row, column) of thread 0, static
                        int first, int lane) const {
    static_assert(element_period<Coords0>() >= 8);  // a thread's columns come in pairs, as those of a quad
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); j += 2) {
      int const pair = get<1>(tScS_0(_0{}, j)) / 2;  // of the quad's first lane
      uint32_t const seen = __shfl_sync(0xffffffff, words[pair / 32], pair % 32 + lane % 4) >> lane / 4;
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTE_UNROLL
        for (int k = 0; k < 2; ++k) {
          if (!(seen & 1u << (16 * k + 8 * i))) scores(first + i, j + k) = -INFINITY;
        }
      }
    }
  }
};

// Of a transposed tile: which of a thread's kSize elements of one column its bits show, as the words of ElementBits.
template <int kSize, int kPeriod>
struct ShownElements {
  static constexpr int kRowWords = kSize / 2 * kPeriod / 32;  // words of 32 rows
  static constexpr int kPairs = 32 / kPeriod;                 // of the thread's elements in such a word
  static constexpr int kElements = 2 * kPairs;
  static_assert(kPeriod >= 8 && kPeriod <= 32 && kRowWords >= 1);

  // Pairs of bits that are kPeriod apart, and the factor that brings them together in a word's highest bits. No two
  // bits of the product come to the same place, so that nothing is carried.
  static constexpr int kShift = 32 - kElements;
  CUTE_HOST_DEVICE static constexpr uint32_t picked() {
    uint32_t bits = 0;
    for (int pair = 0; pair < kPairs; ++pair) bits |= 3u << (kPeriod * pair);
    return bits;
  }
  CUTE_HOST_DEVICE static constexpr uint32_t factor() {
    uint32_t sum = 0;
    for (int pair = 0; pair < kPairs; ++pair) sum |= 1u << (kShift - (kPeriod - 2) * pair);
    return sum;
  }

  // Word kWord. `rows`: the column's bits, of all rows of the tile; `first_row`: the thread's first one.
  template <int kWord>
  CUTE_DEVICE static uint32_t word(uint32_t const (&rows)[kRowWords], int first_row) {
    constexpr uint32_t kPicked = picked(), kFactor = factor();
    constexpr int kOfWord = 32 / kElements, kBegin = kWord * kOfWord;  // words of rows
    uint32_t elements = 0;
    CUTE_UNROLL
    for (int i = cute::min(kRowWords, kBegin + kOfWord) - 1; i >= kBegin; --i) {
      elements = elements << kElements | (rows[i] >> first_row & kPicked) * kFactor >> kShift;
    }
    return elements;
  }
};

// Sets the scores of a transposed tile that the bits hide to -inf. `bits`: of the tile's columns and the 64 rows that
// have its rows.
template <class Scores, class Coords, class Coords0>
CUTE_DEVICE void apply_bits_transposed(Scores& scores,              // (columns, rows)
                                       Coords const& tScS,          // (columns, rows) -> (column, row)
                                       Coords0 const& /*tScS_0*/,  // the same for thread 0, static
                                       int tile_row, RowBits const* bits) {
  constexpr int kSize = decltype(size<1>(scores))::value;
  using Shown = ShownElements<kSize, element_period<Coords0>()>;
  static_assert(Shown::kRowWords <= 2);
  int const first_row = get<1>(tScS(_0{}, _0{})), first_word = Shown::kRowWords == 1 ? tile_row / 32 % 2 : 0;
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    auto const* const words = reinterpret_cast<uint32_t const*>(bits + get<0>(tScS(i, _0{})));
    uint32_t rows[Shown::kRowWords];
    CUTE_UNROLL
    for (int word = 0; word < Shown::kRowWords; ++word) rows[word] = __ldg(words + first_word + word);
    keep_elements<0>(scores(i, _), Shown::template word<0>(rows, first_row));
  }
}

}  // namespace flash_cute
