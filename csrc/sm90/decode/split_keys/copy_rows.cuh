// Tiles of small pages: a lane looks up the pages of its rows, and the lanes copy the vectors of each row side by side.
// TMA takes as long for a box of one row as for one of 16. And where a row has 64 bytes it cannot write one alone: boxes
// begin at multiples of 128 bytes of shared memory.
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

  // A lane's rows. Of keys that no row sees no entry of the table is read, and nothing copied.
  struct Rows {
    int pages[kGroups];
    int rows[kGroups];  // of the page, or kUnseen
  };
  CUTE_DEVICE Rows look_up(Unit const& unit, int tile) const {
    PageTable const& table = params_.table;
    Rows found;
    CUTE_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      int const key = tile * kTileKeys + group * 32 + lane(), page = key / table.page_size;
      bool const seen = key >= unit.seen_begin && key < unit.seen_end;
      found.rows[group] = seen ? key - page * table.page_size : kUnseen;
      found.pages[group] = seen ? __ldg(table.entries + unit.batch * table.stride + page) : 0;
    }
    return found;
  }

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
  static constexpr int kUnseen = -1;

  template <int kChunk, int kChunks>
  struct Columns {
    static constexpr int kOfChunk = kChunk * sizeof(Cache) / kVectorBytes;  // vectors
    static constexpr int kVectors = kChunks * kOfChunk;
  };

  CUTE_DEVICE static int lane() { return threadIdx.x % 32; }

  // Where the lane's row of a group is; null: the page does not exist, and the row is zeros.
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
    constexpr int kVectors = Columns::kVectors, kOfChunk = Columns::kOfChunk;
    uint32_t const to = cute::cast_smem_ptr_to_uint(tile);
    int const bytes = int{sizeof(Cache)} * (values_ ? params_.head_dim_v : params_.head_dim);
    CUTE_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      auto const own = reinterpret_cast<uint64_t>(row_of(rows, group));
      bool const own_seen = rows.rows[group] != kUnseen;
#pragma unroll 4
      for (int i = 0; i < kVectors; ++i) {
        int const row = (i * 32 + lane()) / kVectors, vector = (i * 32 + lane()) % kVectors;
        auto const* const from = reinterpret_cast<char const*>(__shfl_sync(0xffffffff, own, row));
        if (!__shfl_sync(0xffffffff, own_seen, row)) continue;
        int const in_chunk = vector % kOfChunk, chunk_row = vector / kOfChunk * kTileKeys + group * 32 + row;
        int const begin = vector * kVectorBytes;
        int const count = from == nullptr ? 0 : min(kVectorBytes, max(0, bytes - begin));
        int const place = chunk_row * kOfChunk + swizzled<kOfChunk>(row, in_chunk);
        copy_vector(to + place * kVectorBytes, count > 0 ? static_cast<void const*>(from + begin) : params_.q, count);
      }
    }
  }

  DecodeParams const& params_;
  bool values_;
  int head_kv_;
};

}  // namespace flash_cute::sm90::decode::split_keys
