// Stream-K: tiles that several CTAs share. Plain constants and data: no torch, no CuTe.
#pragma once

#include <climits>
#include <cstdint>

namespace flash_cute {

// The tiles of the last, partial wave, split as in stream-K (Osama et al., arXiv 2301.03598): row tiles of a forward
// along the keys, or key tiles of a backward along the rows. Their mainloop steps, tile after tile, are divided into
// contiguous ranges, one per CTA. A range that begins inside a tile computes a part of it: a partial result in global
// memory, which the CTA with the tile's first step merges (the fix-up).
struct TileSplit {
  int tiles = 0;   // number of split tiles; 0: none
  int steps = 0;   // mainloop steps per tile
  int ranges = 0;  // CTAs that share them
  int length = 0;  // steps per range
  int longer = 0;  // the first `longer` ranges have one more step

  constexpr int range_begin(int range) const { return range * length + (range < longer ? range : longer); }

  // The number of parts of a tile that `range` begins: the ranges after it that have steps of the tile.
  constexpr int parts(int tile, int range) const {
    int next = range + 1;
    while (range_begin(next) < (tile + 1) * steps) ++next;
    return next - range - 1;
  }
};

// The overhead of a part in units of steps: its store and load, and one more prologue and epilogue.
constexpr int kPartCost = 6;

// Splits the tiles of the last wave over the SMs, or none where that does not pay. With `equal` there is one range per
// SM, so that all have the same work; else at most about sqrt(steps) ranges per tile, since the CTA that began a tile
// merges its parts one after the other.
constexpr TileSplit split_last_wave(int64_t tiles, int64_t steps, int num_sms, bool equal) {
  int64_t const rest = tiles % num_sms;
  if (rest == 0 || 2 * rest * steps > INT_MAX) return {};
  int64_t parts = 1;
  while (parts * parts < steps) ++parts;
  int64_t const ranges = equal || rest * parts > num_sms ? num_sms : rest * parts;
  int64_t const length = rest * steps / ranges;
  if (length + ranges / rest + kPartCost >= steps) return {};
  return {.tiles = int(rest),
          .steps = int(steps),
          .ranges = int(ranges),
          .length = int(length),
          .longer = int(rest * steps % ranges)};
}

}  // namespace flash_cute
