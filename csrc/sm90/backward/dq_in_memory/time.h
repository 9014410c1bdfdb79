// The predicted time of the sm90 backward up to head dim 128, see planning/time_model.h.
#pragma once

#include "planning/time_model.h"
#include "tile.h"

namespace flash_cute::sm90::backward::dq_in_memory {

// Those above head dim 128 are of dq_in_registers. (Head dim 96 is not fitted, but scaled: when it ran in the kernel of
// 128 its rate was 545.)
constexpr time_model::Rates kRates = {400, 630, 670, 715, 660, 745};
constexpr double kLaunch = 12.7;  // of all its kernels
constexpr double kPackedLaunch = 9.5;

inline double predict(time_model::Work const& work, KernelShape const& shape) {
  using namespace time_model;
  double const step = 10.0 * shape.block_m * shape.block_n * work.head_dim / rate_per_sm(kRates, work.head_dim);
  Tiles const tiles = key_tiles(work, shape);
  double const fixed = kBwdKeys * rows_share(shape.block_n, work.head_dim, tiles);
  return kLaunch + (work.packed ? kPackedLaunch : 0) +
         compute_time(tiles, fixed, step, 1, work.num_sms) + bwd_memory_time(work, 6, shape.block_m);
}

}  // namespace flash_cute::sm90::backward::dq_in_memory
