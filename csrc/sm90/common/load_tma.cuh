// Loads one tile of a tensor into shared memory by TMA.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

namespace flash_cute::sm90 {

using namespace cute;

// A TMA box is kChunk columns of a tile; the map is (column, row, head, batch). Elements outside the tensor arrive as
// zeros, and count towards the barrier's bytes all the same.
template <class Traits>
CUTE_DEVICE void load_tile(CUtensorMap const& map, uint64_t* full, TMA::CacheHintSm90 hint,
                           typename Traits::Element* smem, int rows, int row, int head, int batch) {
  CUTE_UNROLL
  for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
    SM90_TMA_LOAD_4D::copy(&map, full, static_cast<uint64_t>(hint), smem + chunk * rows * Traits::kChunk,
                           chunk * Traits::kChunk, row, head, batch);
  }
}

}  // namespace flash_cute::sm90
