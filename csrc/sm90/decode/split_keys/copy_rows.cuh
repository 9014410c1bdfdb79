// Tiles of small pages: a lane looks up the pages of its rows, and the lanes copy the vectors of a row side by side.
// TMA takes as long for a box of one row as for one of 16. And rows of 64 bytes it cannot write one by one, since its
// boxes begin at multiples of 128 bytes of shared memory.
//
// A type of its own, not a branch of the other loader: in one kernel ptxas 13.0 predicated TMA's instruction, which
// read a coordinate that was not set; and the code between, and the consumers' question for a fence, took small calls 2
// to 8 % of their time.
#pragma once

#include <type_traits>

#include "core/split_keys/work.cuh"
#include "sm90/common/pipeline.cuh"
#include "sm90/decode/common/copies.cuh"
#include "kernel_args.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::split_keys {

template <class Traits>
class RowCopier {
 public:
  using Cache = typename Traits::Cache;
  using Unit = flash_cute::split_keys::Unit;
  static constexpr int kTileKeys = Traits::kTileKeys;
  static constexpr bool kByTma = false;
  static constexpr int kWarps = warps_of_copied_tile(Traits::kCtasPerSm);
  static constexpr int kTileArrivals = kWarps * kCopyArrivals;
  static constexpr int kRows = kTileKeys / kWarps;  // a warp's
  static constexpr int kGroups = kRows / 32;        // of which a lane has a row each

  CUTE_DEVICE RowCopier(KernelArgs const& args, typename Traits::SharedStorage& smem, int warp)
      : params_(args.params),
        smem_(smem),
        values_(warp % 2 != 0),
        first_row_(warp / 2 * kRows),
        head_kv_(int(blockIdx.x) % args.params.heads_kv) {}

  // A lane's rows. Of keys that no row sees no entry of the table is read.
  struct Rows {
    int pages[kGroups];
    int rows[kGroups];  // of the page
  };

  // The pages of a tile are looked up while the tile before is copied.
  CUTE_DEVICE void look_up(Unit const& unit, int begin) { ahead_ = rows_of(unit, begin); }
  CUTE_DEVICE Rows found(Unit const& unit, int tile) {
    Rows const rows = ahead_;
    ahead_ = rows_of(unit, tile + 1);
    return rows;
  }

  CUTE_DEVICE void load(Rows const& rows, PipelineState<Traits::kStages> state) {
    copy(rows, smem_.tiles[state.stage]);
    arrive_with_copies(smem_.pipeline.full[state.stage]);
  }

 private:
  static constexpr int kNoPage = -1;

  template <int kChunk_, int kChunks_>
  struct Columns {
    static constexpr int kChunks = kChunks_;
    static constexpr int kVectors = kChunk_ * sizeof(Cache) / kVectorBytes;  // of a chunk
  };

  CUTE_DEVICE static int lane() { return threadIdx.x % 32; }

  CUTE_DEVICE Rows rows_of(Unit const& unit, int tile) const {
    PageTable const& table = params_.table;
    Rows found;
    CUTE_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      int const key = tile * kTileKeys + first_row_ + group * 32 + lane(), page = key / table.page_size;
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

  template <class Columns>
  CUTE_DEVICE void copy_columns(Rows const& rows, Cache* tile) const {
    constexpr int kVectors = Columns::kVectors, kRowsAtOnce = 32 / kVectors;
    constexpr int kRowBytes = kVectors * kVectorBytes;  // of a chunk
    int const first = lane() / kVectors, vector = lane() % kVectors;  // the lane's of each kRowsAtOnce rows
    uint32_t const to = cute::cast_smem_ptr_to_uint(tile) + (first_row_ + first) * kRowBytes +
                        swizzled<kVectors>(first, vector) * kVectorBytes;
    CacheStrides const& strides = values_ ? params_.v_strides : params_.k_strides;
    int const bytes = int{sizeof(Cache)} * (values_ ? params_.head_dim_v : params_.head_dim) - vector * kVectorBytes;
    CUTE_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      uint64_t const own = address_of_row<Cache>(values_ ? params_.v : params_.k, strides, params_.table.pages,
                                                 head_kv_, rows.pages[group], rows.rows[group]);
      CUTE_UNROLL
      for (int row = 0; row < 32; row += kRowsAtOnce) {
        uint64_t const from = __shfl_sync(0xffffffff, own, first + row);
        CUTE_UNROLL
        for (int chunk = 0; chunk < Columns::kChunks; ++chunk) {
          uint32_t const place = to ^ swizzled<kVectors>(row, 0) * kVectorBytes;
          copy_vector(place + (chunk * kTileKeys + group * 32 + row) * kRowBytes,
                      from + vector * kVectorBytes + chunk * kRowBytes, from != 0 && chunk * kRowBytes < bytes);
        }
      }
    }
  }

  DecodeParams const& params_;
  typename Traits::SharedStorage& smem_;
  bool values_;
  int first_row_;  // the warp's, of a tile
  int head_kv_;
  Rows ahead_;
};

}  // namespace flash_cute::sm90::decode::split_keys
