// S = Q K^T of a row tile and a key tile, over slabs of 128 columns.
//
// 128 / kRows groups of warps sum over as many columns of each slab as there are rows. So each warp has 1024 scores and
// reads few operands for them: those of 16 rows and all keys, or, where there are 64 rows, of 32 rows and 32 keys. The
// groups' sums meet in shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "fragments.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::decode::streamed {

// Where the score of a row and a key is, of a group of warps. Neighbouring rows are in different banks.
template <int kRows>
CUTE_DEVICE int score_offset(int group, int row, int key) {
  return (group * kRows + row) * kTileKeys + (key ^ (row % 4 * 8));
}

template <class Traits, int kRows>
class Scores {
 public:
  using Element = typename Traits::Element;
  static constexpr int kGroups = kKeyColumns / kRows;
  static constexpr int kWarpsOfGroup = kWarps / kGroups;
  static constexpr int kWarpRows = cute::min(32, kRows);
  static constexpr int kWarpKeys = 1024 / kWarpRows;
  static constexpr int kKeyWarps = kTileKeys / kWarpKeys;
  static_assert(kGroups * kRows * kTileKeys == sizeof(Storage::scores) / sizeof(float));

  CUTE_DEVICE Scores() { clear(sums_); }

  // Adds those of a slab.
  template <class Queries>
  CUTE_DEVICE void add(Element const* keys, int slab, Queries const& queries, int head_dim, unsigned thread) {
    Warp const warp(thread);
    int const column = warp.group * kRows;  // in the slab
    if (slab * kKeyColumns + column >= head_dim) return;
    Element const* const block = keys + column / 64 * (64 * kTileKeys);
    CUTE_UNROLL
    for (int step = 0; step < kRows / 16; ++step) {
      int const vector = column % 64 / 8 + 2 * step;
      uint32_t b[kWarpKeys / 16][4];
      CUTE_UNROLL
      for (int j = 0; j < kWarpKeys / 16; ++j) load_right(b[j], block, warp.key + 16 * j, vector, warp.lane);
      CUTE_UNROLL
      for (int i = 0; i < kWarpRows / 16; ++i) {
        uint32_t a[4];
        queries.fetch(a, slab, warp.row + 16 * i, column / 16 + step, warp.lane);
        CUTE_UNROLL
        for (int j = 0; j < kWarpKeys / 8; ++j) {
          multiply<Element>(sums_(_, i, j), a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  CUTE_DEVICE void store(float* scores, unsigned thread) const {
    Warp const warp(thread);
    CUTE_UNROLL
    for (int i = 0; i < 2 * (kWarpRows / 16); ++i) {
      int const row = warp.row + 8 * i + warp.lane / 4;
      CUTE_UNROLL
      for (int j = 0; j < kWarpKeys / 8; ++j) {
        int const offset = score_offset<kRows>(warp.group, row, warp.key + 8 * j + warp.lane % 4 * 2);
        *reinterpret_cast<float2*>(scores + offset) = {sums_(i % 2 * 2, i / 2, j), sums_(i % 2 * 2 + 1, i / 2, j)};
      }
    }
  }

 private:
  // Which scores a warp has.
  struct Warp {
    int lane;
    int group;
    int row;  // the first
    int key;

    CUTE_DEVICE explicit Warp(unsigned thread)
        : lane(thread % 32),
          group(thread / (32 * kWarpsOfGroup)),
          row(thread / 32 % kWarpsOfGroup / kKeyWarps * kWarpRows),
          key(thread / 32 % kWarpsOfGroup % kKeyWarps * kWarpKeys) {}
  };

  Tensor<ArrayEngine<float, 32>, Layout<Shape<_4, Int<kWarpRows / 16>, Int<kWarpKeys / 8>>>> sums_;
};

}  // namespace flash_cute::sm80::decode::streamed
