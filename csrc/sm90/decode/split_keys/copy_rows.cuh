// Tiles of small pages: a lane looks up the pages of its rows, and the lanes copy the vectors of a row side by side.
// TMA takes as long for a box of one row as for one of 16. And rows of 64 bytes it cannot write one by one, since its
// boxes begin at multiples of 128 bytes of shared memory.
#pragma once

#include <type_traits>

#include "core/split_keys/work.cuh"
#include "sm90/decode/common/copies.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::split_keys {

template <class Traits>
class RowCopier {
 public:
  using Cache = typename Traits::Cache;
  using Unit = flash_cute::split_keys::Unit;
  static constexpr int kTileKeys = Traits::kTileKeys;
  static constexpr int kGroups = kTileKeys / 32;  // a lane has a row of each

  // `values`: of V, else of K.
  CUTE_DEVICE RowCopier(DecodeParams const& params, bool values, int head_kv)
      : params_(params), values_(values), head_kv_(head_kv) {}

  // A lane's rows. Of keys that no row sees no entry of the table is read.
  struct Rows {
    int pages[kGroups];
    int rows[kGroups];  // of the page
  };
  CUTE_DEVICE Rows look_up(Unit const& unit, int tile) const {
    PageTable const& table = params_.table;
    Rows found;
    CUTE_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      int const key = tile * kTileKeys + group * 32 + lane(), page = key / table.page_size;
      bool const seen = key >= unit.seen_begin && key < unit.seen_end;
      found.rows[group] = key - page * table.page_size;
      found.pages[group] = seen ? __ldg(table.entries + unit.batch * table.stride + page) : kNoPage;
    }
    return found;
  }

  // Rows of pages that do not exist become zeros.
  CUTE_DEVICE void copy(Rows const& rows, Cache* tile) const {
    using K = Columns<Traits::kChunkK, Traits::kHeadDim / Traits::kChunkK>;
    using V = Columns<Traits::kChunkV, Traits::kHeadDimV / Traits::kChunkV>;
    if constexpr (std::is_same_v<K, V>) {
      copy_columns<K>(rows, tile);
    } else if (values_) {
      copy_columns<V>(rows, tile);
    } else {
      copy_columns<K>(rows, tile);
    }
  }

 private:
  static constexpr int kNoPage = -1;

  template <int kChunk_, int kChunks_>
  struct Columns {
    static constexpr int kChunks = kChunks_;
    static constexpr int kVectors = kChunk_ * sizeof(Cache) / kVectorBytes;  // of a chunk
  };

  CUTE_DEVICE static int lane() { return threadIdx.x % 32; }

  // Where the lane's row of a group is; null: the page does not exist.
  CUTE_DEVICE char const* row_of(Rows const& rows, int group) const {
    CacheStrides const& strides = values_ ? params_.v_strides : params_.k_strides;
    int const page = rows.pages[group];
    if (unsigned(page) >= unsigned(params_.table.pages)) return nullptr;
    return reinterpret_cast<char const*>(static_cast<Cache const*>(values_ ? params_.v : params_.k) +
                                         page * strides.page + head_kv_ * strides.head +
                                         rows.rows[group] * strides.row);
  }

  template <class Columns>
  CUTE_DEVICE void copy_columns(Rows const& rows, Cache* tile) const {
    constexpr int kVectors = Columns::kVectors, kRowsAtOnce = 32 / kVectors;
    constexpr int kRowBytes = kVectors * kVectorBytes;  // of a chunk
    int const first = lane() / kVectors, vector = lane() % kVectors;  // the lane's of each kRowsAtOnce rows
    uint32_t const to =
        cute::cast_smem_ptr_to_uint(tile) + first * kRowBytes + swizzled<kVectors>(first, vector) * kVectorBytes;
    int const bytes = int{sizeof(Cache)} * (values_ ? params_.head_dim_v : params_.head_dim) - vector * kVectorBytes;
    CUTE_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      auto const own = reinterpret_cast<uint64_t>(row_of(rows, group));
      CUTE_UNROLL
      for (int row = 0; row < 32; row += kRowsAtOnce) {
        uint64_t const from = __shfl_sync(0xffffffff, own, first + row);
        CUTE_UNROLL
        for (int chunk = 0; chunk < Columns::kChunks; ++chunk) {
          uint32_t const place = to ^ swizzled<kVectors>(row, 0) * kVectorBytes;
          copy_vector(place + (chunk * kTileKeys + group * 32 + row) * kRowBytes,
                      reinterpret_cast<char const*>(from) + vector * kVectorBytes + chunk * kRowBytes,
                      from != 0 && chunk * kRowBytes < bytes);
        }
      }
    }
  }

  DecodeParams const& params_;
  bool values_;
  int head_kv_;
};

}  // namespace flash_cute::sm90::decode::split_keys
