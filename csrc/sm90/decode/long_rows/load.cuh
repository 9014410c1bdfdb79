// The warps that load row tiles by TMA: one loads Q and K, another V. A key tile is loaded in boxes, each of rows of
// one page and of a chunk of the columns. A lane has a box, whose page it looks up a key tile ahead; or several, where
// pages are so small that there are more than 32. Where there are no pages, a box has all rows of a key tile.
// What hands a key tile to the consumers is a type: TilesAsStored, or that of float8 numbers, see load_float8.cuh.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/registers.cuh"
#include "sm90/common/sequence_map.cuh"
#include "sm90/common/warpgroup.cuh"
#include "sequences.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::long_rows {

// What follows from a row tile: overloaded for tiles of several heads, see sm90/decode/key_chunks/tile.cuh.
template <class Traits>
CUTE_DEVICE int first_position(SequenceTile const volatile& tile) {
  return tile.m_block * Traits::kBlockM;
}
// Where a sequence of a cache that has no pages is.
CUTE_DEVICE int contiguous_page(SequenceTile const volatile& tile) { return tile.batch; }
CUTE_DEVICE constexpr int row_of_key_0(SequenceTile const volatile&) { return 0; }
// Whether the tile's rows of Q are those of the tile before; and the buffer that they are loaded to.
CUTE_DEVICE constexpr bool has_queries(SequenceTile const volatile&) { return false; }
template <class Traits>
CUTE_DEVICE auto query_state(SequenceTile const volatile&, int tile_number) {
  return Traits::q_state(tile_number);
}

// A warpgroup's.
template <class Traits>
CUTE_DEVICE constexpr int query_bytes(SequenceTile const&) {
  return Traits::kQElements * int{sizeof(typename Traits::Element)};
}
template <class Traits, class Params_>
CUTE_DEVICE void load_queries(Args<Params_> const& args, typename Traits::SharedStorage& smem, SequenceTile const& tile,
                              int warpgroup, uint64_t* full, int stage) {
  SequenceOrigin const origin = sequence_origin(args.params, tile, tile.sequence.first_row, tile.sequence.len_q);
  sm90::load_tile<typename Traits::ColumnsQK>(args.q, full, TMA::CacheHintSm90::EVICT_FIRST, smem.q[stage][warpgroup],
                                              Traits::kRows, tile.m_block * Traits::kBlockM + warpgroup * Traits::kRows,
                                              tile.head, origin);
}

// Loads Q of a row tile. By one lane.
template <class Traits, class Args>
CUTE_DEVICE void load_row_tile_of_q(Args const& args, typename Traits::SharedStorage& smem, int tile_number) {
  auto const& tile = smem.tile[tile_number & 1];
  if (has_queries(tile)) return;
#pragma unroll 1
  for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
    // The warpgroup's four warps have finished all GEMMs with the Q that was there.
    auto const state = query_state<Traits>(tile, tile_number);
    smem.q_pipeline[wg].wait_empty(state);
    uint64_t* const full = smem.q_pipeline[wg].expect(state, query_bytes<Traits>(tile));
    load_queries<Traits>(args, smem, tile, wg, full, state.stage);
  }
}

// Which keys exist for a row tile: from `first`, the first one that its first row sees, on.
struct ExistingKeys {
  template <class Traits>
  CUTE_DEVICE static ExistingKeys of(typename Traits::Tile const volatile& tile) {
    // No limit to the left: far below 0.
    return {max(0, first_position<Traits>(tile) + tile.sequence.band.lower), tile.sequence.len_k};
  }

  int first;
  int limit;

  CUTE_DEVICE bool has(int key) const { return key >= first && key < limit; }
  CUTE_DEVICE bool are_whole(int begin, int count) const { return begin >= first && begin + count <= limit; }
};

// Makes zeros of the rows of V in key tile n, stored in chunks of 128 bytes, whose keys do not exist. By a warp.
template <int kBlockN, int kHeadDim>
CUTE_DEVICE void clear_values(void* values, int n, ExistingKeys const& keys) {
  constexpr int kVectors = 8;  // of 16 bytes, of a row of a chunk
  auto* const vectors = static_cast<uint4*>(values);
#pragma unroll 1
  for (int i = fresh_thread_index() % 32; i < kHeadDim / 64 * kBlockN * kVectors; i += 32) {
    if (!keys.has(n * kBlockN + i / kVectors % kBlockN)) vectors[i] = uint4{};
  }
}

// Key tiles of 16-bit numbers: TMA itself hands them to the consumers.
//
// V of keys that do not exist must be zeros: their P is 0, but 0 times what a page has there may be NaN. So of a key
// tile at the end of the keys, or at the first key of a window, the warp waits for V itself, clears those rows and
// hands it to the consumers.
template <class Traits, bool kValues, class Args>
class TilesAsStored {
 public:
  using SharedStorage = typename Traits::SharedStorage;
  using Element = typename Traits::Element;
  using Columns = std::conditional_t<kValues, typename Traits::ColumnsV, typename Traits::ColumnsQK>;
  using State = PipelineState<Traits::kStages>;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr bool kLoadsQueries = !kValues;
  static constexpr int kRowBytes = Columns::kChunks * Columns::kChunk * int{sizeof(Element)};

  CUTE_DEVICE TilesAsStored(Args const& args, SharedStorage& smem) : args_(args), smem_(smem) {}

  // Where TMA arrives. `whole`: all keys of the tile exist.
  CUTE_DEVICE uint64_t& full(State state, bool whole) const {
    return kValues && !whole ? edge_pipeline(smem_).full[0] : pipeline().full[state.stage];
  }
  // Until all consumer warps have finished the GEMM with what was in the stage.
  CUTE_DEVICE void wait_empty(State state) const { pipeline().wait_empty(state); }

  // A box of a key tile's buffer, from its `row_in_tile` on.
  CUTE_DEVICE void load(uint64_t& full, int stage, int chunk, int row_in_tile, int row_in_page, int page,
                        int head) const {
    Element* const to = kValues ? smem_.v[stage] : smem_.k[stage];
    SM90_TMA_LOAD_4D::copy(kValues ? &args_.v : &args_.k, &full, uint64_t(TMA::CacheHintSm90::EVICT_LAST),
                           to + (chunk * kBlockN + row_in_tile) * Columns::kChunk, chunk * Columns::kChunk, row_in_page,
                           head, page);
  }

  // TMA has been asked for key tile n.
  CUTE_DEVICE void on_its_way(int n, State state, bool whole, ExistingKeys const& keys) {
    if constexpr (kValues) {
      if (whole) return;
      edge_pipeline(smem_).wait_full({0, edges_++ & 1});
      static_assert(Columns::kChunk == 64);
      clear_values<kBlockN, Traits::kHeadDimV>(smem_.v[state.stage], n, keys);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // WGMMA reads them
      __syncwarp();
      if (fresh_thread_index() % 32 == 0) smem_.v_pipeline.publish(state);
    }
  }

 private:
  CUTE_DEVICE auto& pipeline() const { return kValues ? smem_.v_pipeline : smem_.k_pipeline; }

  Args const& args_;
  SharedStorage& smem_;
  int edges_ = 0;  // key tiles at an edge, so far
};

// `kValues`: of V, else of Q and K.
template <class Traits, bool kValues, class Args = KernelArgs, class Tiles = TilesAsStored<Traits, kValues, Args>>
class Loader {
 public:
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kBlockN = Traits::kBlockN;

  CUTE_DEVICE Loader(Args const& args, SharedStorage& smem)
      : args_(args), smem_(smem), tiles_(args, smem) {}

  CUTE_DEVICE void run() {
#pragma unroll 1
    for (;; ++tile_number_) {
      smem_.tile_pipeline.wait_full(at_step(tile_number_));  // the scheduler has written the tile
      if (tile().m_block < 0) return;
      load_row_tile();
      __syncwarp();  // all lanes have read the tile
      if (lane() == 0) smem_.tile_pipeline.arrive_empty(at_step(tile_number_));
    }
  }

 private:
  using Columns = typename Tiles::Columns;
  static constexpr int kChunk = Columns::kChunk, kChunks = Columns::kChunks;
  using State = PipelineState<Traits::kStages>;
  static constexpr int kNoPage = -1;
  static constexpr int kUsualBits = 4;  // of boxes of 16 rows

  // Where the lane's first box of a key tile is: a row of a page of the sequence.
  struct Place {
    int page;
    int row;
  };

  CUTE_DEVICE static int lane() { return fresh_thread_index() % 32; }
  CUTE_DEVICE typename Traits::Tile const volatile& tile() const { return smem_.tile[opaque(tile_number_) & 1]; }

  CUTE_DEVICE void load_row_tile() {
    keys_ = ExistingKeys::of<Traits>(tile());
    if (args_.params.table.entries == nullptr) return load_contiguous();
    int n = tile().keys.end - 1;
    if (n < tile().keys.begin) return load_q();
    int const key = n * kBlockN + row_of_lane();
    Place place{.page = args_.page_size.div(key), .row = args_.page_size.rem(key)};
    int page = page_at(n, row_of_lane(), place.page);
#pragma unroll 1
    for (; n >= tile().keys.begin; --n) {
      int const row = place.row;
      place.page -= args_.tile_pages;
      place.row -= args_.tile_rows;
      if (place.row < 0) {
        place.row += args_.params.table.page_size;
        --place.page;
      }
      int const next = page_at(n - 1, row_of_lane(), place.page);  // before the warp waits for a buffer
      load_keys(n, row, page);
      page = next;
      if (n == tile().keys.end - 1) load_q();
    }
  }

  CUTE_DEVICE void load_contiguous() {
    int n = uniform(tile().keys.end) - 1, row = uniform(row_of_key_0(tile())) + n * kBlockN;
    if (n < tile().keys.begin) return load_q();
    int count = uniform(tile().keys.count);
    bool is_first = true;
#pragma unroll 1
    for (; n >= tile().keys.begin; --n, row -= kBlockN) {
      State const state = at_use<Traits::kStages>(count++);
      bool const whole = is_whole(n);
      auto& full = tiles_.full(state, whole);
      int const head = uniform(tile().head_kv);
      int const page = args_.params.table.pages == 0 ? kNoPage : uniform(contiguous_page(tile()));
      tiles_.wait_empty(state);
      if (cute::elect_one_sync()) {
        set_barrier_transaction_bytes(full, uint32_t{kBlockN * Tiles::kRowBytes});  // with what is outside of the map
        CUTE_UNROLL
        for (int chunk = 0; chunk < kChunks; ++chunk) tiles_.load(full, state.stage, chunk, 0, row, page, head);
      }
      __syncwarp();
      tiles_.on_its_way(n, state, whole, keys_);
      if (is_first) load_q();
      is_first = false;
    }
  }

  CUTE_DEVICE void load_q() {
    if (Tiles::kLoadsQueries && lane() == 0) load_row_tile_of_q<Traits>(args_, smem_, tile_number_);
  }

  // In a key tile, of the lane's first box.
  CUTE_DEVICE int row_of_lane() const { return lane() / kChunks << args_.box_bits; }

  // Keys exist from the first one that the row tile's first row sees up to the sequence's last.
  CUTE_DEVICE bool is_whole(int n) const { return keys_.are_whole(n * kBlockN, kBlockN); }
  // The box from `row` of a key tile on has keys that exist.
  CUTE_DEVICE bool exists(int n, int row) const {
    int const key = n * kBlockN + row;
    return n >= 0 && row < kBlockN && key + args_.box_rows() > keys_.first && key < keys_.limit;
  }
  // The rows of the boxes that have some.
  CUTE_DEVICE int existing_rows(int n) const {
    int const begin = max(0, keys_.first - n * kBlockN) >> args_.box_bits;
    int const end = (min(kBlockN, keys_.limit - n * kBlockN) + args_.box_rows() - 1) >> args_.box_bits;
    return (end - begin) << args_.box_bits;
  }

  // The number of a sequence's page, of which the box from `row` on is. Of keys that do not exist no entry of the table
  // is read. Pages that do not exist are outside of the map, and arrive as zeros.
  CUTE_DEVICE int page_at(int n, int row, int page) const {
    PageTable const& table = args_.params.table;
    if (!exists(n, row) || table.pages == 0) return kNoPage;
    return __ldg(table.entries + tile().batch * table.stride + page);
  }

  // `row`, `page`: of the lane's first box.
  CUTE_DEVICE void load_keys(int n, int row, int page) {
    State const state = at_use<Traits::kStages>(tile().keys.count + tile().keys.end - 1 - n);
    bool const whole = is_whole(n);
    auto& full = tiles_.full(state, whole);
    if (args_.box_bits == kUsualBits && whole) {
      // One elected lane loads, from what is known as uniform: TMA takes uniform registers, which a loop over the lanes
      // would fill else.
      constexpr int kBoxes = kBlockN >> kUsualBits;
      static_assert(kBoxes * kChunks <= 32);
      int const head = uniform(tile().head_kv);
      int row_of_box = uniform(row);
      int pages[kBoxes];
      CUTE_UNROLL
      for (int box = 0; box < kBoxes; ++box) pages[box] = __shfl_sync(0xffffffff, page, box * kChunks);
      tiles_.wait_empty(state);
      if (cute::elect_one_sync()) {
        set_barrier_transaction_bytes(full, uint32_t{kBlockN * Tiles::kRowBytes});
        CUTE_UNROLL
        for (int box = 0; box < kBoxes; ++box) {
          CUTE_UNROLL
          for (int chunk = 0; chunk < kChunks; ++chunk) {
            tiles_.load(full, state.stage, chunk, box << kUsualBits, row_of_box, pages[box], head);
          }
          row_of_box += 1 << kUsualBits;  // a page has a multiple of these
          if (row_of_box >= args_.params.table.page_size) row_of_box = 0;
        }
      }
      __syncwarp();
      tiles_.on_its_way(n, state, whole, keys_);
      return;
    }
    tiles_.wait_empty(state);
    __syncwarp();
    if (lane() == 0) {
      set_barrier_transaction_bytes(full, uint32_t((whole ? kBlockN : existing_rows(n)) * Tiles::kRowBytes));
    }
    int const chunk = lane() % kChunks, head = tile().head_kv;
    if (exists(n, row_of_lane())) tiles_.load(full, state.stage, chunk, row_of_lane(), row, page, head);
#pragma unroll 1
    for (int r = row_of_lane() + (32 / kChunks << args_.box_bits); r < kBlockN; r += 32 / kChunks << args_.box_bits) {
      int const key = n * kBlockN + r;
      if (!exists(n, r)) continue;
      tiles_.load(full, state.stage, chunk, r, args_.page_size.rem(key), page_at(n, r, args_.page_size.div(key)), head);
    }
    tiles_.on_its_way(n, state, whole, keys_);
  }

  Args const& args_;
  SharedStorage& smem_;
  Tiles tiles_;
  int tile_number_ = 0;
  ExistingKeys keys_;  // of the row tile
};

// What a kernel has beside its consumers and the scheduler. Of float8 caches: see load_float8.cuh; of small pages:
// copy_rows.cuh.
template <class Traits>
struct Producers {
  using Args = KernelArgs;
  static constexpr bool kByTma = true;  // K and V come
  static constexpr int kLoadingWarps = 2;
  static constexpr int kTileArrivals = 1;  // by which K or V of a key tile is complete

  CUTE_DEVICE static void init(typename Traits::SharedStorage& smem) { edge_pipeline(smem).init(1); }
  // The roles of warps 0, 2 and 3 of the producer warpgroup.
  CUTE_DEVICE static void first(Args const& args, typename Traits::SharedStorage& smem) {
    Loader<Traits, /*kValues=*/false>(args, smem).run();
  }
  CUTE_DEVICE static void second(Args const& args, typename Traits::SharedStorage& smem) {
    Loader<Traits, /*kValues=*/true>(args, smem).run();
  }
  CUTE_DEVICE static void third(Args const&, typename Traits::SharedStorage&) {}  // the first one loads Q, too
};

}  // namespace flash_cute::sm90::decode::long_rows
