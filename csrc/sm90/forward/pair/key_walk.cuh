// The order of a row tile's key tiles.
//
// Where CTAs read the same keys at the same time, head dim 1024 is 1.2 times as fast as where all read different ones.
// With a causal mask row tiles are drawn longest first. The first wave, a row tile for each cluster, begins together;
// it reads the same keys if it ascends. The next one ends together, since each of its row tiles begins a step later
// than the one drawn before it, and is a step shorter; it reads the same keys if it descends:
//
//     key tile |  / : \  :        wave 0, ascending: row tiles end one after the other
//              | /  :  \ :        wave 1, descending: they begin one after the other
//              |/   :   \:
//              +------------> time
#pragma once

#include "core/sequence.cuh"
#include "contract/params.h"
#include "sm90/forward/common/scheduler.cuh"

namespace flash_cute::sm90::forward::pair {

// A SequenceTile with its wave.
struct RowTile : forward::TileCoord {
  int wave;  // TileOrder::wave
  Sequence sequence;
};

struct KeyWalk {
  int steps;
  int first;      // key tile
  int direction;  // 1 or -1

  CUTE_DEVICE int tile(int step) const { return first + direction * step; }
};

// Over key tiles [begin, end) of a row tile of that wave. With ALiBi always descending: the nearest keys have the
// largest scores, and where they come last, O is rescaled at every step (8 % slower at head dim 512).
CUTE_DEVICE KeyWalk key_walk(FwdParams const& params, int begin, int end, int wave) {
  bool const ascending = wave % 2 == 0 && params.score.slopes == nullptr;
  return {.steps = end - begin, .first = ascending ? begin : end - 1, .direction = ascending ? 1 : -1};
}

}  // namespace flash_cute::sm90::forward::pair
