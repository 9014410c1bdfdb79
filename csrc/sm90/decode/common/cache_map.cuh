// The TMA descriptors of a cache, encoded on the host.
#pragma once

#include <algorithm>

#include "contract/decode.h"
#include "sm90/common/tensor_map.cuh"

namespace flash_cute::sm90::decode {

// The rows of a TMA box: the largest power of two, up to the tile, that divides the page. A contiguous cache is one
// page a sequence, in which tiles begin at multiples of their size.
inline int box_rows(DecodeParams const& params, int tile_keys) {
  int rows = tile_keys;
  while (params.table.entries != nullptr && params.table.page_size % rows != 0) rows /= 2;
  return rows;
}

// A cache without rows is never read: then the map is of something that there is.
template <class Cache>
cudaError_t encode_cache(CUtensorMap* map, void const* data, CacheStrides const& strides, DecodeParams const& params,
                         int heads, int head_dim, Box box) {
  PageTable const& table = params.table;
  int const page_size = std::max<int>(1, table.page_size), pages = std::max(1, table.pages);
  return encode_map<Cache, 4>(
      map, table.capacity > 0 && table.pages > 0 ? data : params.q,
      {uint64_t(head_dim), uint64_t(page_size), uint64_t(heads), uint64_t(pages)},
      {pitch<Cache>(page_size, strides.row), pitch<Cache>(heads, strides.head), pitch<Cache>(pages, strides.page)}, box,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

}  // namespace flash_cute::sm90::decode
