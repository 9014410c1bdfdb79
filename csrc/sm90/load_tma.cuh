// One tile of a tensor to shared memory by TMA.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

namespace flash_cute::sm90 {

using namespace cute;

// One TMA box is kChunk columns of a tile; the map is (column, row, head, batch). What lies outside the
// tensor arrives as zeros and still counts as bytes.
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
