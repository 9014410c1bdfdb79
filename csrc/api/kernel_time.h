// What a kernel takes on a Hopper GPU, predicted from its tiles: the plan takes the kernel with the least time, see
// choice.h. docs/tuning.md has how near the predictions are to measured times, and the choices to the best ones.
#pragma once

#include <array>
#include <cstdint>

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

// Sequences of one length.
struct EqualSequences {
  int number;
  int len_q;
  int len_k;
};

// A call as the predictions see it.
struct Work {
  std::array<EqualSequences, 2> sequences;  // of a dense batch the first alone; of a packed one see sequences_of
  bool packed;
  bool ends_aligned;  // packed: the last row has the position of the last key
  int heads_q;
  int heads_kv;
  int head_dim;    // the next one that the model has rates for, see nominal_head_dim
  int head_dim_v;
  Band band;  // packed: relative to a row's position, see make_band
  int num_sms;

  constexpr Band band_of(EqualSequences const& some) const {
    int const offset = packed && ends_aligned ? some.len_k - some.len_q : 0;
    return {.lower = band.has_lower() ? band.lower + offset : band.lower,
            .upper = band.has_upper() ? band.upper + offset : band.upper};
  }
};

// The tiles of the last wave of a dense sm90 forward, split by keys; none where that is impossible or does not pay in
// steps.
TileSplit fwd_split(Work const& work, KernelShape const& shape);

// Whether the CTAs of a sm90 forward draw their tiles, where these differ in length; else they are dealt.
bool fwd_draws(Work const& work, KernelShape const& shape);

// The forward. `speed`: of the tile, relative to the fastest one of its head dim; `heads`: query heads per row tile.
double fwd_sm90(Work const& work, KernelShape const& shape, double speed, int heads, TileSplit const& split);
double fwd_sm80(Work const& work, KernelShape const& shape);

// The kernels of a backward together. `any_scores`: of sm80 it is the kernel of modified scores.
double bwd_sm90(Work const& work, KernelShape const& shape);
double bwd_sm90_wide(Work const& work, KernelShape const& shape);
double bwd_sm80(Work const& work, KernelShape const& shape, bool any_scores);

}  // namespace flash_cute::kernel_time
