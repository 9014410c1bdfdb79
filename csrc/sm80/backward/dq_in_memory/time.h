// The predicted time of the sm80 backward on a Hopper GPU, see planning/time_model.h.
#pragma once

#include "planning/time_model.h"
#include "tile.h"

namespace flash_cute::sm80::backward::dq_in_memory {

constexpr time_model::Rates kRates = {265, 375, 300, 345, 230, 205};
constexpr double kLaunch = 5.8;  // of all its kernels
constexpr double kPackedLaunch = 6.5;
constexpr double kAnyScoresSlowdown = 1.3;  // of the kernel of modified scores
constexpr double kPackedSlowdown = 1.4;

// A CTA that has its multiprocessor to itself steps 2 / 1.28 times as fast as beside another one.
constexpr double kAloneStep = 1.28;

// `any_scores`: it is the kernel of modified scores.
inline double predict(time_model::Work const& work, KernelShape const& shape, bool any_scores) {
  using namespace time_model;
  double const slowdown = (any_scores ? kAnyScoresSlowdown : 1) * (work.packed ? kPackedSlowdown : 1);
  double const rate = rate_per_sm(kRates, work.head_dim) / slowdown;
  double const step = 10.0 * shape.block_m * shape.block_n * work.head_dim / rate;
  Tiles const tiles = key_tiles(work, shape);
  double const fixed = kBwdTile + kBwdKeys * rows_share(shape.block_n, work.head_dim, tiles);
  double const alone = shape.ctas_per_sm > 1 ? kAloneStep : 1;
  return kLaunch + (work.packed ? kPackedLaunch : 0) +
         compute_time(tiles, fixed, step, shape.ctas_per_sm, work.num_sms, alone) +
         bwd_memory_time(work, 6, shape.block_m);
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
