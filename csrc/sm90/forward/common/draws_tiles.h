// Whether the CTAs of a persistent forward draw their tiles.
#pragma once

#include "planning/time_model.h"
#include "row_tile_order.h"

namespace flash_cute::sm90::forward {

// For tiles that differ in length; else they are dealt.
inline bool draws_tiles(time_model::Work const& work, KernelShape const& shape) {
  auto const& [longest, others] = work.sequences;
  int64_t tiles = 0;
  for (time_model::EqualSequences const& some : work.sequences) {
    tiles += int64_t{some.number} * time_model::ceil_div(some.len_q, shape.block_m);
  }
  bool const alike = others.number == 0 || longest.len_q <= shape.block_m;
  return tiles * work.heads_q > int64_t{work.num_sms} * most_dealt_waves(alike);
}

}  // namespace flash_cute::sm90::forward
