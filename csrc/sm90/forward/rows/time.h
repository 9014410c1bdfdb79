// The predicted time of the sm90 forward, and what of its schedule depends on times: see planning/time_model.h.
#pragma once

#include "planning/time_model.h"
#include "sm90/forward/common/draws_tiles.h"
#include "tile.h"

namespace flash_cute::sm90::forward::rows {

using time_model::Work;

constexpr time_model::Rates kRates = {390, 640, 770, 850, 910, 915};
constexpr double kLaunch = 2.6;
constexpr double kTile = 1.5;
constexpr double kRowsTime = 1.3;  // loads and stores of 128 rows of head dim 128

// What packed sequences add: to read the lengths and to find the tiles.
constexpr double kPackedLaunch = 2.0, kPackedSequence = 0.045;
constexpr int kMostSequencesMeasured = 128;  // of more the time hides behind their tiles
constexpr double kPackedDraws = 0.7;         // to zero the ticket counter, which the launch of dense calls includes
constexpr double kPackedTile = -0.75;

constexpr double kSplitMemory = 1.05;  // the parts of split tiles read keys in less regular order

// The tiles of the last wave of a dense batch, split by keys; none where that is impossible or does not pay in steps.
inline TileSplit split_tiles(Work const& work, KernelShape const& shape) {
  auto const [batch, len_q, len_k] = work.sequences[0];
  Band const& band = work.band;
  if (band.has_lower()) return {};  // row tiles begin with different keys
  int64_t const last_row = band.has_upper() ? int64_t{len_q} + band.upper : len_k;
  int64_t const keys = std::clamp<int64_t>(last_row, 0, len_k);  // of the longest row tile
  int64_t const tiles = int64_t{batch} * work.heads_q * time_model::ceil_div(len_q, shape.block_m);
  // Tiles that differ much in length, and those that are drawn, even out.
  if (band.has_upper() && (keys < 2 * int64_t{len_q} || tiles > work.num_sms)) return {};
  return split_last_wave(tiles, (keys + shape.block_n - 1) / shape.block_n, work.num_sms, tiles > work.num_sms);
}

// `speed`: of the tile, relative to the fastest one of its head dim; `heads`: query heads per row tile.
inline double predict(Work const& work, KernelShape const& shape, double speed, int heads, TileSplit const& split) {
  using namespace time_model;
  double const step = fwd_step(work, shape, speed * rate_per_sm(kRates, work.head_dim));
  Tiles const tiles = row_tiles(work, shape.block_m / heads, shape.block_n, work.heads_q / heads);
  double launch = kLaunch;
  double fixed = kTile + kRowsTime * rows_share(shape.block_m, work.head_dim, tiles);
  if (work.packed) {
    int const sequences = work.sequences[0].number + work.sequences[1].number;
    launch += kPackedLaunch + kPackedSequence * std::min(sequences, kMostSequencesMeasured) +
              (draws_tiles(work, shape) ? kPackedDraws : 0);
    fixed += kPackedTile;
  }
  double const memory = key_bytes(work) / kFwdBandwidth;
  if (split.tiles == 0) return launch + std::max(compute_time(tiles, fixed, step, 1, work.num_sms), memory);
  double const whole_waves = std::floor(tiles.number / work.num_sms);
  double const last = fixed + step * (split.length + split.ranges / split.tiles + kPartCost);
  return launch + std::max(whole_waves * (fixed + step * tiles.longest) + last, memory * kSplitMemory);
}

}  // namespace flash_cute::sm90::forward::rows
