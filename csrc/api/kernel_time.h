// What a kernel takes on a Hopper GPU, predicted from its tiles: the plan takes the kernel with the least time, see
// choice.h. docs/tuning.md has how near the predictions are to measured times, and the choices to the best ones.
#pragma once

#include "core/kernel_shape.h"
#include "core/tile_split.h"
#include "params.h"

namespace flash_cute::kernel_time {

// Above the last one: itself.
constexpr int kHeadDims[] = {32, 64, 96, 128, 192, 256};
constexpr int nominal_head_dim(int head_dim) {
  for (int known : kHeadDims) {
    if (head_dim <= known) return known;
  }
  return head_dim;
}

// A call as the predictions see it. A packed batch of equal lengths counts as a dense one. Of others the host knows the
// totals alone: they count as one sequence that has at least `least_tiles` tiles per head, one per sequence.
struct Work {
  int len_q;
  int len_k;
  int batch;
  int least_tiles;
  int heads_q;
  int heads_kv;
  int head_dim;    // the next one that the model has rates for, see nominal_head_dim
  int head_dim_v;
  Band band;
  int num_sms;
};

// The tiles of the last wave of a sm90 forward, split by keys; none where that is impossible or does not pay in steps.
TileSplit fwd_split(Work const& work, KernelShape const& shape);

// The forward. `speed`: of the tile, relative to the fastest one of its head dim; `heads`: query heads per row tile.
double fwd_sm90(Work const& work, KernelShape const& shape, double speed, int heads, TileSplit const& split);
double fwd_sm80(Work const& work, KernelShape const& shape);

// The kernels of a backward together. `any_scores`: of sm80 it is the kernel of modified scores.
double bwd_sm90(Work const& work, KernelShape const& shape);
double bwd_sm90_wide(Work const& work, KernelShape const& shape);
double bwd_sm80(Work const& work, KernelShape const& shape, bool any_scores);

}  // namespace flash_cute::kernel_time
