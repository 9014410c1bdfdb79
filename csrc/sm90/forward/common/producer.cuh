// What the first two warps of the producer warpgroup do where a CTA owns query rows, by the type of its tiles: one
// thread loads, and of a dense batch schedules too; where sequences are read at run time, the second warp schedules.
#pragma once

#include "load.cuh"
#include "sequence_scheduler.cuh"

namespace flash_cute::sm90::forward {

// Initialises the barriers of smem.tile, which `warps` warps read; a SequenceTile the loading thread, too.
template <class SharedStorage>
CUTE_DEVICE void init_tile_barriers(SharedStorage& smem, int warps, TileCoord const&) {
  smem.tile_pipeline.init(warps);
}
template <class SharedStorage>
CUTE_DEVICE void init_tile_barriers(SharedStorage& smem, int warps, SequenceTile const&) {
  smem.tile_pipeline.init(warps + 1);
  smem.next_tile.init(1);
}

// `warp`: its number in the warpgroup.
template <class Traits, class Args>
CUTE_DEVICE void run_producer_warp(Args const& args, typename Traits::SharedStorage& smem, int, TileCoord const&) {
  if (threadIdx.x == 0) producer<Traits>(args, smem);
}
template <class Traits, class Args>
CUTE_DEVICE void run_producer_warp(Args const& args, typename Traits::SharedStorage& smem, int warp,
                                   SequenceTile const&) {
  if (warp == 1) schedule_sequences<Traits>(args.params, smem);
  if (threadIdx.x == 0) sequence_producer<Traits>(args, smem);
}

}  // namespace flash_cute::sm90::forward
