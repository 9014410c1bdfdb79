// The predicted time of the sm80 forward on a Hopper GPU, see planning/time_model.h.
#pragma once

#include "planning/time_model.h"
#include "tile.h"

namespace flash_cute::sm80::forward::rows {

constexpr time_model::Rates kRates = {235, 315, 370, 330, 320, 405};
constexpr double kLaunch = 0.9;
constexpr double kTile = 2.5;
constexpr double kRowsTime = 2.75;  // loads and stores of 128 rows of head dim 128
constexpr double kPackedTile = 0.95;

inline double predict(time_model::Work const& work, KernelShape const& shape) {
  using namespace time_model;
  double const step = fwd_step(work, shape, rate_per_sm(kRates, work.head_dim));
  Tiles const tiles = row_tiles(work, shape.block_m, shape.block_n, work.heads_q);
  double const fixed = kTile + kRowsTime * rows_share(shape.block_m, work.head_dim, tiles) +
                       (work.packed ? kPackedTile : 0);
  double const alone = work.packed ? shape.ctas_per_sm : 1;
  double const compute = compute_time(tiles, fixed, step, shape.ctas_per_sm, work.num_sms, alone);
  return kLaunch + std::max(compute, key_bytes(work) / kFwdBandwidth);
}

}  // namespace flash_cute::sm80::forward::rows
