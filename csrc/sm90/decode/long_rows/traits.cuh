// Types of the kernel of long sequences: those of the forward of packed batches.
#pragma once

#include "sm90/forward/rows/traits.cuh"
#include "tile.h"

namespace flash_cute::sm90::decode::long_rows {

using forward::SequenceTile;

template <class Element, int kHeadDim>
using Traits = forward::rows::Traits<Element, kHeadDim, tile_config(kHeadDim), Variant::kPacked, kHeadDim>;

// Full: V of a key tile at an edge has landed, see load.cuh. Tiles are dealt here, so that the barrier by which the
// scheduler waits to draw the next one is free.
template <class SharedStorage>
CUTE_DEVICE auto& edge_pipeline(SharedStorage& smem) {
  return smem.next_tile;
}

}  // namespace flash_cute::sm90::decode::long_rows
