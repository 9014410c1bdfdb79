// The warps that bring row tiles where pages are small: their lanes copy the rows of keys (cp.async). TMA takes as long
// for a box of one row as for one of 16, and cannot write single rows of 64 bytes, since its boxes begin at multiples
// of 128 bytes of shared memory. Why this is a kernel of its own: sm90/decode/split_keys/copy_rows.cuh.
//
// Of 16-bit caches one warp copies rows of K, one rows of V, and a third one the rest of both. Of float8 caches one
// warp copies all, beside the two that make the numbers float16. No warp waits for its copies: a tile's barrier does,
// by an arrival of each lane. The consumers then make what was copied visible to WGMMA, see CopiedPipeline.
#pragma once

#include <algorithm>
#include <type_traits>

#include "load_float8.cuh"
#include "sm90/decode/common/copies.cuh"

namespace flash_cute::sm90::decode::long_rows {

// Copies rows [kFirstRow, kFirstRow + kRows) of key tiles, 32 at a time, of which a lane has one. By a warp.
template <class Traits, class Columns, int kFirstRow, int kRows>
class RowCopier {
 public:
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kGroups = (kRows + 31) / 32;
  using Cache = typename Columns::Element;

  CUTE_DEVICE RowCopier(Params const& params, cutlass::FastDivmod const& page_size)
      : params_(params), page_size_(page_size) {}

  // The page of a lane's row of key tile n. Of keys that do not exist no entry of the table is read.
  CUTE_DEVICE int page_of(typename Traits::Tile const volatile& tile, int n, int group) const {
    PageTable const& table = params_.table;
    int const key = key_of_lane(n, group);
    bool const exists =
        group * 32 + lane() < kRows && ExistingKeys::of<Traits>(tile).has(key) && table.pages > 0;
    return exists ? __ldg(table.entries + tile.batch * table.stride + page_size_.div(key)) : kNoPage;
  }

  // Rows of keys and of pages that do not exist become zeros.
  template <bool kValues, int kGroup>
  CUTE_DEVICE void copy(int n, int page, int head_kv, Cache* tile) const {
    int const first = lane() / kVectors, vector = lane() % kVectors;  // the lane's of each kRowsAtOnce rows
    uint32_t const to =
        cast_smem_ptr_to_uint(tile) + first * kRowBytes + swizzled<kVectors>(first, vector) * kVectorBytes;
    int const bytes = int{sizeof(Cache)} * (kValues ? params_.head_dim_v : params_.head_dim) - vector * kVectorBytes;
    Strides const& strides = kValues ? params_.v_strides : params_.k_strides;
    uint64_t const own = address_of_row<Cache>(
        kValues ? params_.v : params_.k, {.page = strides.batch, .head = strides.head, .row = strides.row},
        params_.table.pages, head_kv, page, page_size_.rem(key_of_lane(n, kGroup)));
    CUTE_UNROLL
    for (int row = 0; row < std::min(32, kRows - kGroup * 32); row += kRowsAtOnce) {
      int const row_of_tile = kFirstRow + kGroup * 32 + row;
      uint64_t const from = __shfl_sync(0xffffffff, own, first + row);
      uint32_t const place = to ^ swizzled<kVectors>(row_of_tile, 0) * kVectorBytes;
      CUTE_UNROLL
      for (int chunk = 0; chunk < Columns::kChunks; ++chunk) {
        copy_vector(place + (chunk * kBlockN + row_of_tile) * kRowBytes,
                    from + vector * kVectorBytes + chunk * kRowBytes, from != 0 && chunk * kRowBytes < bytes);
      }
    }
  }

 private:
  static constexpr int kNoPage = -1;
  static constexpr int kRowBytes = Columns::kChunk * int{sizeof(Cache)};  // of a chunk
  static constexpr int kVectors = kRowBytes / kVectorBytes;
  static constexpr int kRowsAtOnce = 32 / kVectors;
  static_assert(kFirstRow % kRowsAtOnce == 0 && kRows % kRowsAtOnce == 0);

  CUTE_DEVICE static int lane() { return fresh_thread_index() % 32; }
  CUTE_DEVICE static int key_of_lane(int n, int group) { return n * kBlockN + kFirstRow + group * 32 + lane(); }

  Params const& params_;
  cutlass::FastDivmod const& page_size_;
};

// A warp that copies. `Tiles` says what: see below.
template <class Traits, class Tiles, class Args>
class CopyingWarp {
 public:
  using SharedStorage = typename Traits::SharedStorage;

  CUTE_DEVICE CopyingWarp(Args const& args, SharedStorage& smem)
      : args_(args), smem_(smem), rows_(args.params, args.page_size) {}

  CUTE_DEVICE void run() {
#pragma unroll 1
    for (;; ++tile_number_) {
      smem_.tile_pipeline.wait_full(at_step(tile_number_));  // the scheduler has written the tile
      if (tile().m_block < 0) return;
      copy_row_tile();
      __syncwarp();  // all lanes have read the tile
      // opaque: else its stage keeps a register over the row tile; of float8 caches with head dim 64, one on the stack.
      if (lane() == 0) smem_.tile_pipeline.arrive_empty(at_step(opaque(tile_number_)));
    }
  }

 private:
  using Rows = typename Tiles::Rows;
  using State = PipelineState<Traits::kStages>;
  static constexpr int kGroups = Rows::kGroups;
  static_assert(Tiles::kValuesBehind == 0 || kGroups == 1);  // one page is remembered

  CUTE_DEVICE static int lane() { return fresh_thread_index() % 32; }
  CUTE_DEVICE typename Traits::Tile const volatile& tile() const { return smem_.tile[opaque(tile_number_) & 1]; }
  CUTE_DEVICE State state_of(int n) const {
    return at_use<Traits::kStages>(tile().keys.count + tile().keys.end - 1 - n);
  }
  CUTE_DEVICE void load_q() {
    if (Tiles::kLoadsQueries && lane() == 0) load_row_tile_of_q<Traits>(args_, smem_, tile_number_);
  }

  CUTE_DEVICE void copy_row_tile() {
    int n = tile().keys.end - 1;
    if (n < tile().keys.begin) return load_q();
    int ahead = rows_.page_of(tile(), n, 0), before = 0;
#pragma unroll 1
    for (; n >= tile().keys.begin - Tiles::kValuesBehind; --n) {
      bool const has_keys = Tiles::kHasKeys && n >= tile().keys.begin;
      bool const has_values = Tiles::kHasValues && n + Tiles::kValuesBehind < tile().keys.end;
      for_each(make_seq<kGroups>{}, [&](auto group) {
        int const page = ahead;
        if (group < kGroups - 1) {
          ahead = rows_.page_of(tile(), n, group + 1);
        } else if (n > tile().keys.begin) {
          ahead = rows_.page_of(tile(), n - 1, 0);
        }
        if (has_keys) copy</*kValues=*/false, group>(n, page);
        if (has_values) {
          copy</*kValues=*/true, group>(n + Tiles::kValuesBehind, Tiles::kValuesBehind > 0 ? before : page);
        }
        before = page;
      });
      if (n == tile().keys.end - 1) load_q();
    }
  }

  template <bool kValues, int kGroup>
  CUTE_DEVICE void copy(int n, int page) {
    constexpr bool kBegins = kGroup == 0 && (!kValues || !Tiles::kCompleteTogether);
    constexpr bool kCompletes = kGroup == kGroups - 1 && (kValues || !Tiles::kCompleteTogether);
    State const state = state_of(n);
    auto& pipeline = Tiles::template pipeline<kValues>(smem_);
    if (kBegins) pipeline.wait_empty(state);
    __syncwarp();
    rows_.template copy<kValues, kGroup>(n, page, tile().head_kv, Tiles::template place<kValues>(smem_, state.stage));
    if (kCompletes) arrive_with_copies(pipeline.full[state.stage]);
  }

  Args const& args_;
  SharedStorage& smem_;
  Rows rows_;
  int tile_number_ = 0;
};

// Of 16-bit caches: where K and V of a key tile are.
template <class Traits>
struct CopiedTiles {
  using SharedStorage = typename Traits::SharedStorage;
  template <bool kValues>
  CUTE_DEVICE static auto& pipeline(SharedStorage& smem) {
    return kValues ? smem.v_pipeline : smem.k_pipeline;
  }
  template <bool kValues>
  CUTE_DEVICE static auto* place(SharedStorage& smem, int stage) {
    return kValues ? smem.v[stage] : smem.k[stage];
  }

  static constexpr bool kCompleteTogether = false;  // K and V of a key tile

  // A warp copies so many rows of K, or of V, of the tile's: about two thirds; or 32, of which a lane has one.
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kAlone = kBlockN <= 64 ? 32 : (2 * (kBlockN / 4) + 2) / 3 * 4;
  static_assert(std::is_same_v<typename Traits::ColumnsQK, typename Traits::ColumnsV>);
  template <int kFirstRow, int kRows>
  using RowsOf = RowCopier<Traits, typename Traits::ColumnsQK, kFirstRow, kRows>;
};
template <class Traits, bool kValues>
struct OwnRows : CopiedTiles<Traits> {
  using Rows = typename CopiedTiles<Traits>::template RowsOf<0, CopiedTiles<Traits>::kAlone>;
  static constexpr bool kHasKeys = !kValues, kHasValues = kValues, kLoadsQueries = !kValues;
  static constexpr int kValuesBehind = 0;
};
template <class Traits>
struct OtherRows : CopiedTiles<Traits> {
  using Tiles = CopiedTiles<Traits>;
  using Rows = typename Tiles::template RowsOf<Tiles::kAlone, Tiles::kBlockN - Tiles::kAlone>;
  static constexpr bool kHasKeys = true, kHasValues = true, kLoadsQueries = false;
  static constexpr int kValuesBehind = 1;  // V is needed with K of the next key tile: their places become free at once
};

// Of float8 caches: K and V as they are stored.
template <class Traits>
struct CopiedStoredTiles {
  using SharedStorage = typename Traits::SharedStorage;
  template <bool>
  CUTE_DEVICE static auto& pipeline(SharedStorage& smem) {
    return smem.stored_pipeline;
  }
  template <bool kValues>
  CUTE_DEVICE static auto* place(SharedStorage& smem, int stage) {
    return kValues ? smem.stored_v[stage] : smem.stored_k[stage];
  }
  using Rows = RowCopier<Traits, typename Traits::Columns, 0, Traits::kBlockN>;
  static constexpr bool kCompleteTogether = true, kHasKeys = true, kHasValues = true, kLoadsQueries = true;
  static constexpr int kValuesBehind = 0;
};

// Of K or V that warps have copied. What they wrote in one way, WGMMA reads in another.
template <int kStages>
struct CopiedPipeline : Pipeline<kStages> {
  CUTE_DEVICE void wait_full(PipelineState<kStages> state) {
    Pipeline<kStages>::wait_full(state);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
};

// The types of a kernel that copies rows. Its warps that load need more registers. Three consumer warpgroups have some
// to spare, two and four have none.
template <class Base>
struct Copying : Base {
  static constexpr int kProducerRegs = Base::kWarpgroups == 3 ? 56 : Base::kProducerRegs;
  static constexpr int kConsumerRegs = Base::kWarpgroups == 3 ? 152 : Base::kConsumerRegs;
  using SharedStorage = typename Base::template Storage<CopiedPipeline<Base::kStages>>;
};
// The consumers read what the widening warps have written.
template <class Result, int kHeadDim>
struct Copying<Float8Traits<Result, kHeadDim>> : Float8Traits<Result, kHeadDim> {};

template <class Base>
struct Producers<Copying<Base>> {
  using Traits = Copying<Base>;
  using Args = KernelArgs;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr bool kByTma = false;
  static constexpr int kLoadingWarps = 3;
  static constexpr int kTileArrivals = 2 * kCopyArrivals;  // an own warp's, and the third's

  CUTE_DEVICE static void init(SharedStorage&) {}
  // The roles of warps 0, 2 and 3.
  CUTE_DEVICE static void first(Args const& args, SharedStorage& smem) {
    CopyingWarp<Traits, OwnRows<Traits, /*kValues=*/false>, Args>(args, smem).run();
  }
  CUTE_DEVICE static void second(Args const& args, SharedStorage& smem) {
    CopyingWarp<Traits, OwnRows<Traits, /*kValues=*/true>, Args>(args, smem).run();
  }
  CUTE_DEVICE static void third(Args const& args, SharedStorage& smem) {
    CopyingWarp<Traits, OtherRows<Traits>, Args>(args, smem).run();
  }
};

// As those of float8 caches whose keys TMA loads, but for the first warp.
template <class Result, int kHeadDim>
struct Producers<Copying<Float8Traits<Result, kHeadDim>>> : Producers<Float8Traits<Result, kHeadDim>> {
  using Traits = Copying<Float8Traits<Result, kHeadDim>>;
  static constexpr bool kByTma = false;

  CUTE_DEVICE static void init(typename Traits::SharedStorage& smem) { smem.stored_pipeline.init(2, kCopyArrivals); }
  CUTE_DEVICE static void first(Float8Args const& args, typename Traits::SharedStorage& smem) {
    CopyingWarp<Traits, CopiedStoredTiles<Traits>, Float8Args>(args, smem).run();
  }
};

}  // namespace flash_cute::sm90::decode::long_rows
