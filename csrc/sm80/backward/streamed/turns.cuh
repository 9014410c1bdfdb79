// Whose turn it is: a CTA alone takes the tiles of the other side for each query head from the last to the first. Of a
// pair each CTA computes W of every second one of them, and then takes W of its partner's.
#pragma once

#include <cute/tensor.hpp>

#include "task.cuh"

namespace flash_cute::sm80::backward::streamed {

using namespace cute;

// Both have at least one tile.
template <class Storage, Side kSide>
class LoneTurns {
 public:
  CUTE_DEVICE explicit LoneTurns(Storage const& smem) : task_(smem.task), tile_(smem.task.others.end - 1) {}

  CUTE_DEVICE static constexpr bool is_own() { return true; }
  CUTE_DEVICE static constexpr bool has_tile() { return true; }
  CUTE_DEVICE int head() const { return head_; }  // from the task's first one on
  CUTE_DEVICE int tile() const { return tile_; }

  // False: there are no more turns.
  CUTE_DEVICE bool advance() {
    if (--tile_ < task_.others.begin) {
      tile_ = task_.others.end - 1;
      if (++head_ == task_.template loop_heads<kSide>()) return false;
    }
    return true;
  }

 private:
  typename Storage::Task const& task_;
  int head_ = 0;
  int tile_;
};

// Turns 0, 2, 4, ... are this CTA's, and those behind them the partner's; the last turn of one of them has no tile if
// their number is odd.
template <class Storage, Side kSide>
class PairTurns {
 public:
  CUTE_DEVICE explicit PairTurns(Storage const& smem) : smem_(smem) {}

  CUTE_DEVICE int turn() const { return turn_; }
  CUTE_DEVICE bool is_own() const { return smem_.pair.messages == 0 || turn_ % 2 == 0; }
  CUTE_DEVICE bool has_tile() const { return number() < smem_.pair.tiles; }
  CUTE_DEVICE int head() const { return kSide == Side::kKeys ? number() / tiles_per_head() : 0; }
  CUTE_DEVICE int tile() const {
    int const from_last = kSide == Side::kKeys ? number() % tiles_per_head() : number();
    return smem_.task.others.end - 1 - from_last;
  }

  CUTE_DEVICE bool advance() { return ++turn_ < max(smem_.pair.tiles, 2 * smem_.pair.messages); }

 private:
  // Of the tile, in the order of a CTA alone.
  CUTE_DEVICE unsigned number() const { return turn_ ^ smem_.pair.part; }
  CUTE_DEVICE unsigned tiles_per_head() const { return smem_.task.others.end - smem_.task.others.begin; }

  Storage const& smem_;
  int turn_ = 0;
};

}  // namespace flash_cute::sm80::backward::streamed
