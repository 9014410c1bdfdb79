// Whose turn it is: a CTA alone takes all key tiles, from the last to the first. Of a pair each CTA computes the scores
// of every second tile, and then takes P of its partner's.
#pragma once

#include <cute/tensor.hpp>

#include "core/mask.cuh"

namespace flash_cute::sm80::forward::streamed {

template <bool kPaired>
class Turns {
 public:
  // `part`: of out's columns, that of the CTA.
  CUTE_DEVICE Turns(TileRange const& keys, int part) : begin_(keys.begin), part_(part), lead_(keys.end - 1) {}

  // Whether there are more turns, with or without a tile.
  CUTE_DEVICE bool more() const { return lead_ >= begin_; }
  CUTE_DEVICE bool is_own() const { return !kPaired || own_; }
  CUTE_DEVICE int tile() const { return kPaired ? lead_ - (own_ ? part_ : 1 - part_) : lead_; }
  CUTE_DEVICE bool has_tile() const { return tile() >= begin_; }

  CUTE_DEVICE void advance() {
    if constexpr (kPaired) {
      own_ = !own_;
      if (own_) lead_ -= 2;
    } else {
      --lead_;
    }
  }

 private:
  int begin_;
  int part_;
  int lead_;  // the tile of the first CTA, where it is its turn
  bool own_ = true;
};

}  // namespace flash_cute::sm80::forward::streamed
