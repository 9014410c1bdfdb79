// Tiles that several CTAs share. Plain constants and data: no torch, no CuTe.
#pragma once

#include <climits>
#include <cstdint>

namespace flash_cute {

// Tiles that fill no whole wave of CTAs (stream-K: Osama et al., arXiv 2301.03598): row tiles of a forward, split by
// keys, or key tiles of a backward, split by rows. Their steps, one tile's after the other's, are dealt in ranges, one a
// CTA. What a range has of a tile that an earlier one begins is a part: it goes through memory to the CTA that began
// the tile.
struct TileSplit {
  int tiles = 0;   // 0: none is split
  int steps = 0;   // of each
  int ranges = 0;
  int length = 0;  // steps of a range,
  int longer = 0;  // and one more in so many of them, the first

  constexpr int range_begin(int range) const { return range * length + (range < longer ? range : longer); }

  // The ranges that have some of a tile, besides the one that begins it.
  constexpr int parts(int tile, int range) const {
    int next = range + 1;
    while (range_begin(next) < (tile + 1) * steps) ++next;
    return next - range - 1;
  }
};

// What a part costs besides its steps, in steps: its way through memory, and one more beginning and end.
constexpr int kPartCost = 6;

// The tiles of the last wave, split over the SMs; none where it would not be worth it. With `equal`, there is a range for
// each SM, so that all have as much to do; else no more than pay, since one CTA takes the parts in, one after the other.
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
