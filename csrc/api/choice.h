// Which kernel serves a call on a Hopper GPU, where the caller leaves that to the plan: of sm90's tiles, whole or with
// the last wave split, and the sm80 kernel, the one with the least predicted time. Nothing decides but the shapes, the
// mask, the options and the GPU.
#pragma once

#include "kernel_time.h"
#include "planner.h"

namespace flash_cute {

// Of sm80 there is one candidate per kernel, the table that was the fastest on an H200 where sm80 was faster than sm90
// (docs/tuning.md).
constexpr int fwd_chip_on_hopper(bool packed) { return packed ? sm80::kA100 : sm80::kSmem99K; }
constexpr int bwd_chip_on_hopper(int head_dim, bool packed) {
  if (packed) return head_dim == 64 ? sm80::kSmem99K : sm80::kA100;
  return head_dim > 128 ? sm80::kSmem99K : sm80::kH100;
}

// Sets the backend, tile and split in `problem` that it leaves open. Does nothing where there is one kernel: on other
// GPUs, for the head dims of fwd_large and bwd_large, with float16 accumulation, in a build without sm90's kernel.
Predicted choose_fwd(Problem& problem, bool packed, Gpu gpu);
Predicted choose_bwd(Problem& problem, bool packed, bool deterministic, Gpu gpu);

Variant fwd_variant(Problem const& problem, FwdInstance const& instance, bool packed);

// The sequences as the predictions see them. Of packed ones the host knows the totals, and from the hints the longest
// lengths: one sequence is taken to have these, and the others to share the rest equally; where that is more than a tile
// of rows, and the longest one is far longer still, half of them.
std::array<kernel_time::EqualSequences, 2> sequences_of(Problem const& problem, bool packed);

// Whether the CTAs of a sm90 forward draw their tiles, where these differ in length; else they are dealt.
bool fwd_draws(Problem const& problem, KernelShape const& shape, bool packed, Gpu gpu);

// The tiles of the last wave of a sm90 forward, split by keys; none where that is impossible or does not pay.
TileSplit fwd_split(Problem const& problem, KernelShape const& shape, Gpu gpu);

// The query heads of a row tile of a sm90 forward.
int fwd_tile_heads(Problem const& problem, KernelShape const& shape);

}  // namespace flash_cute
