// The predicted time of the sm90 backward above head dim 128, see planning/time_model.h.
#pragma once

#include "planning/time_model.h"
#include "sm90/backward/dq_in_memory/time.h"
#include "tile.h"

namespace flash_cute::sm90::backward::dq_in_registers {

constexpr double kLaunch = 2.9;  // of all its kernels
constexpr double kPackedLaunch = 8.5;
constexpr double kPackedTile = 5;

// dK and dV take four GEMMs; then dQ takes three, with the tiles of `shape` but twice the rows per CTA.
inline double predict(time_model::Work const& work, KernelShape const& shape) {
  using namespace time_model;
  double const flops_per_gemm = 2.0 * shape.block_m * shape.block_n * work.head_dim;
  double const gemm = flops_per_gemm / rate_per_sm(dq_in_memory::kRates, work.head_dim);
  Tiles const keys = key_tiles(work, shape);
  Tiles const rows = row_tiles(work, 2 * shape.block_m, shape.block_n, work.heads_q);
  double const per_tile = kBwdTile + (work.packed ? kPackedTile : 0);
  double const fixed = per_tile + kBwdKeys * rows_share(shape.block_n, work.head_dim, keys);
  double const share = work.packed ? rows.full : 1;  // the constants of dense calls were fitted without it
  double const fixed_of_dq = per_tile + kBwdKeys * 2 * shape.block_m * work.head_dim * share / (128.0 * 128.0);
  return kLaunch + (work.packed ? kPackedLaunch : 0) +
         compute_time(keys, fixed, 4 * gemm, 1, work.num_sms) +
         compute_time(rows, fixed_of_dq, 3 * 2 * gemm, 1, work.num_sms) + bwd_memory_time(work, 4, 0);
}

}  // namespace flash_cute::sm90::backward::dq_in_registers
