// The warps that load row tiles by TMA: one loads Q and K, another V. A key tile is loaded in boxes, each of rows of
// one page and of a chunk of the columns: a lane has a box, or several where pages are so small that there are more
// than 32.
//
// V of keys that do not exist must be zeros: their P is 0, but 0 times what a page has there may be NaN. So of a key
// tile at the end of the keys, or at the first key of a window, the warp waits for V itself, clears those rows and
// hands it to the consumers.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/registers.cuh"
#include "sm90/common/sequence_map.cuh"
#include "sequences.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::long_rows {

constexpr int kLoadingWarps = 2;

// `kValues`: of V, else of Q and K.
template <class Traits, bool kValues>
class Loader {
 public:
  using SharedStorage = typename Traits::SharedStorage;
  using Element = typename Traits::Element;
  static constexpr int kBlockN = Traits::kBlockN;

  CUTE_DEVICE Loader(KernelArgs const& args, SharedStorage& smem)
      : args_(args), smem_(smem), lane_(threadIdx.x % 32) {}

  CUTE_DEVICE void run() {
#pragma unroll 1
    for (;; ++tile_number_) {
      smem_.tile_pipeline.wait_full(at_step(tile_number_));  // the scheduler has written the tile
      if (tile().m_block < 0) return;
      load_row_tile();
      __syncwarp();  // all lanes have read the tile
      if (lane_ == 0) smem_.tile_pipeline.arrive_empty(at_step(tile_number_));
    }
  }

 private:
  using Columns = std::conditional_t<kValues, typename Traits::ColumnsV, typename Traits::ColumnsQK>;
  static constexpr int kChunk = Columns::kChunk, kChunks = Columns::kChunks;

  // Read again at each use: the warp has few registers.
  CUTE_DEVICE SequenceTile const volatile& tile() const { return smem_.tile[opaque(tile_number_) & 1]; }

  // The keys that exist, as far as the row tile is concerned: from the first one that its first row sees.
  CUTE_DEVICE int first_key() const {
    return max(0, tile().m_block * Traits::kBlockM + tile().sequence.band.lower);  // no limit: far below 0
  }
  CUTE_DEVICE int key_limit() const { return tile().sequence.len_k; }

  CUTE_DEVICE void load_row_tile() {
    int n = tile().keys.end - 1;
    if (n >= tile().keys.begin) load_keys(n);
    load_q();
#pragma unroll 1
    while (--n >= tile().keys.begin) load_keys(n);
  }

  CUTE_DEVICE void load_q() {
    if (kValues || lane_ != 0) return;
    SequenceTile const& tile = smem_.tile[tile_number_ & 1];
    SequenceOrigin const origin = sequence_origin(args_.params, tile, tile.sequence.first_row, tile.sequence.len_q);
#pragma unroll 1
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      // The warpgroup's four warps have finished all GEMMs with the Q that was there.
      auto const state = Traits::q_state(tile_number_);
      smem_.q_pipeline[wg].wait_empty(state);
      sm90::load_tile<Columns>(args_.q,
                               smem_.q_pipeline[wg].expect(state, Traits::kQElements * int{sizeof(Element)}),
                               TMA::CacheHintSm90::EVICT_FIRST, smem_.q[state.stage][wg], Traits::kRows,
                               tile.m_block * Traits::kBlockM + wg * Traits::kRows, tile.head, origin);
    }
  }

  // A box has keys that exist.
  CUTE_DEVICE bool exists(int key) const { return key + args_.box_rows() > first_key() && key < key_limit(); }
  // The rows of a key tile's boxes that have keys which exist.
  CUTE_DEVICE int existing_rows(int n) const {
    int const begin = max(0, first_key() - n * kBlockN) >> args_.box_bits;
    int const end = (min(kBlockN, max(0, key_limit() - n * kBlockN)) + args_.box_rows() - 1) >> args_.box_bits;
    return max(0, end - begin) << args_.box_bits;
  }
  CUTE_DEVICE int key_of(int n, int box) const { return n * kBlockN + (box << args_.box_bits); }

  // The page of a box. Of keys that do not exist no entry of the table is read. Pages that do not exist are outside of
  // the map, and arrive as zeros.
  CUTE_DEVICE int page_of(int n, int box) const {
    PageTable const& table = args_.params.table;
    int const key = key_of(n, box);
    if ((box << args_.box_bits) >= kBlockN || key < 0 || !exists(key) || table.pages == 0) return -1;
    if (table.entries == nullptr) return tile().batch;
    return __ldg(table.entries + tile().batch * table.stride + args_.page_size.div(key));
  }

  CUTE_DEVICE void load_keys(int n) {
    int const page = page_of(n, lane_ / kChunks);  // of this lane's first box: looked up while the warp waits
    PipelineState<2> const state = at_step(tile().keys.count + tile().keys.end - 1 - n);
    auto& pipeline = kValues ? smem_.v_pipeline : smem_.k_pipeline;
    bool const edge = kValues && (n * kBlockN < first_key() || (n + 1) * kBlockN > key_limit());
    auto& full = edge ? edge_pipeline(smem_).full[0] : pipeline.full[state.stage];
    pipeline.wait_empty(state);  // all consumer warps have finished the GEMM with this stage, of two steps ago
    constexpr int kRowBytes = kChunks * kChunk * int{sizeof(Element)};
    if (lane_ == 0) set_barrier_transaction_bytes(full, uint32_t(existing_rows(n) * kRowBytes));
    __syncwarp();
    Element* const to = kValues ? smem_.v[state.stage] : smem_.k[state.stage];
#pragma unroll 1
    for (int box = lane_ / kChunks; (box << args_.box_bits) < kBlockN; box += 32 / kChunks) {
      int const key = key_of(n, box), chunk = lane_ % kChunks;
      if (!exists(key)) continue;
      SM90_TMA_LOAD_4D::copy(kValues ? &args_.v : &args_.k, &full, uint64_t(TMA::CacheHintSm90::EVICT_LAST),
                             to + (chunk * kBlockN + (box << args_.box_bits)) * kChunk, chunk * kChunk,
                             args_.page_size.rem(key), int(tile().head_kv),
                             box == lane_ / kChunks ? page : page_of(n, box));
    }
    if constexpr (kValues) {
      if (edge) finish_edge(n, state);
    }
  }

  // Clears the rows of V whose keys do not exist.
  CUTE_DEVICE void finish_edge(int n, PipelineState<2> state) {
    constexpr int kVectors = kChunk * int{sizeof(Element)} / 16;  // of a row of a chunk
    edge_pipeline(smem_).wait_full({0, edges_++ & 1});
    auto* const vectors = reinterpret_cast<uint4*>(smem_.v[state.stage]);
#pragma unroll 1
    for (int i = lane_; i < kChunks * kBlockN * kVectors; i += 32) {
      int const key = n * kBlockN + i / kVectors % kBlockN;
      if (key < first_key() || key >= key_limit()) vectors[i] = uint4{};
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // WGMMA reads them
    __syncwarp();
    if (lane_ == 0) smem_.v_pipeline.publish(state);
  }

  KernelArgs const& args_;
  SharedStorage& smem_;
  int lane_;
  int tile_number_ = 0;
  int edges_ = 0;  // key tiles at an edge, so far
};

}  // namespace flash_cute::sm90::decode::long_rows
