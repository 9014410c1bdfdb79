// The producer: a warp that schedules row tiles, walks over the key tiles that they visit, and loads Q, K and V by TMA.
// With K of a key tile comes what the next one is to each warpgroup, and where one needs the mask, the intervals of its
// columns, or the address of their bits.
#pragma once

#include "key_walk.cuh"
#include "sm90/common/load_tma.cuh"
#include "sm90/common/warpgroup.cuh"
#include "sm90/forward/common/args.cuh"
#include "sm90/forward/common/scheduler.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::masked_rows {

// All lanes wait at a pipeline, and the first one loads. It begins when all have passed their wait: a lane that still
// waited when what it loads is released would wait for the release after that.
template <class Traits>
class Producer {
 public:
  using SharedStorage = typename Traits::SharedStorage;
  using Element = typename Traits::Element;

  CUTE_DEVICE Producer(KernelArgs const& args, SharedStorage& smem) : args_(args), smem_(smem) {}

  CUTE_DEVICE void run() {
    publish_tile(0);
#pragma unroll 1
    for (int tile_number = 0; tile_.m_block >= 0; ++tile_number) {
      VisitedTile tile = first_, next{0, 0};
      if (tile.flags != 0) {
        next = walk_.next(args_.params.mask);
        load_k(tile, next.flags);
      }
      load_q(tile_number);
#pragma unroll 1
      while (next.flags != 0) {
        int const before = tile.number;
        tile = next;
        next = walk_.next(args_.params.mask);
        load_k(tile, next.flags);
        load_v(before, count_ - 2, tile_);
      }
      // The last V is needed later than the next tile's number and first bits, which take as long as a step.
      RowTile const row_tile = tile_;
      publish_tile(tile_number + 1);
      if (tile.flags != 0) load_v(tile.number, count_ - 1, row_tile);
    }
  }

 private:
  struct RowTile {
    int m_block;  // -1: there are no more tiles
    int head;
    int head_kv;
    int batch;
  };

  CUTE_DEVICE static bool is_first_lane() { return threadIdx.x % 32 == 0; }

  // Finds the tile, its first key tile, and makes it known to the consumers.
  CUTE_DEVICE void publish_tile(int tile_number) {
    FwdParams const& params = args_.params;
    smem_.tile_pipeline.wait_empty(at_step(tile_number));  // all consumer warps have finished the tile before the last
    int index = dealt_number(blockIdx.x, gridDim.x, tile_number);
    if (params.draws_tiles && tile_number > 0) {
      if (is_first_lane()) index = int(gridDim.x) + atomicAdd(params.ticket, 1);
      index = uniform(index);
    }
    bool const exists = unsigned(index) < unsigned(params.order.num_tiles());
    RowTileCoord const coord = params.order.coord(exists ? index : 0);
    tile_ = {.m_block = -1,
             .head = coord.head,
             .head_kv = coord.head / params.order.heads_per_kv,
             .batch = coord.batch};
    if (exists) tile_.m_block = sorted(coord.m_block);
    first_ = {0, 0};
    if (exists) {
      walk_.begin(params.mask, tile_.batch, tile_.head_kv, tile_.m_block);
      first_ = walk_.next(params.mask);
    }
    if (is_first_lane()) {
      TileCoord volatile& tile = smem_.tile[tile_number & 1];
      tile.m_block = tile_.m_block;
      tile.head = tile_.head;
      tile.batch = tile_.batch;
      tile.keys.end = int(first_.flags);
      tile.keys.count = count_;
      smem_.tile_pipeline.publish(at_step(tile_number));
    }
    __syncwarp();
  }

  // The order has the last row tile of each head first; with a list, the one that visits the most key tiles.
  CUTE_DEVICE int sorted(int m_block) const {
    TileMask const& mask = args_.params.mask;
    if (mask.row_order == nullptr) return m_block;
    int const* const order =
        mask.row_order + tile_.batch * mask.row_order_batch_stride + tile_.head_kv * mask.row_order_head_stride;
    return order[args_.params.order.m_blocks - 1 - m_block];
  }

  CUTE_DEVICE void load_q(int tile_number) {
#pragma unroll 1
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      // The warpgroup's four warps have finished all GEMMs with the Q that was there.
      auto const state = Traits::q_state(tile_number);
      smem_.q_pipeline[wg].wait_empty(state);
      __syncwarp();
      if (is_first_lane()) {
        load_tile<typename Traits::ColumnsQK>(
            args_.q, smem_.q_pipeline[wg].expect(state, Traits::kQElements * int{sizeof(Element)}),
            TMA::CacheHintSm90::EVICT_FIRST, smem_.q[state.stage][wg], Traits::kRows,
            tile_.m_block * Traits::kBlockM + wg * Traits::kRows, tile_.head, tile_.batch);
      }
    }
    __syncwarp();
  }

  CUTE_DEVICE void load_k(VisitedTile tile, uint32_t next_flags) {
    TileMask const& mask = args_.params.mask;
    constexpr int kBytes = Traits::kKElements * int{sizeof(Element)};
    constexpr int kIntervalBytes = Traits::kBlockN * int{sizeof(RowInterval)};
    auto const state = at_use<Traits::kStages>(count_++);
    // All consumer warps have finished S with what was in this stage, and have read its slot and intervals.
    smem_.k_pipeline.wait_empty(state);
    __syncwarp();
    if (is_first_lane()) {
      int const intervals = KeyFlags::some_masked(tile.flags) ? mask.intervals_per_column : 0;
      KeySlot volatile& published = smem_.slots[state.stage];
      published.word = KeySlot::word_of(tile.number, next_flags);
      if (mask.bits != nullptr) published.bits = bits_of(tile.number);
      uint64_t* const full = smem_.k_pipeline.expect(state, kBytes + intervals * kIntervalBytes);
      load_tile<typename Traits::ColumnsQK>(args_.k, full, TMA::CacheHintSm90::EVICT_LAST, smem_.k[state.stage],
                                            Traits::kBlockN, tile.number * Traits::kBlockN, tile_.head_kv,
                                            tile_.batch);
      RowInterval const* from = mask.intervals + tile_.batch * mask.batch_stride + tile_.head_kv * mask.head_stride +
                                int64_t{tile.number} * Traits::kBlockN;
      for (int n = 0; n < intervals; ++n, from += mask.interval_stride) {
        SM90_BULK_COPY_G2S::copy(from, full, smem_.intervals[state.stage][n], kIntervalBytes);
      }
    }
    __syncwarp();
  }

  // Of a key tile's columns and the row tile's first 64 rows.
  CUTE_DEVICE RowBits const* bits_of(int number) const {
    static_assert(Traits::kRows == kBitRows);
    TileMask const& mask = args_.params.mask;
    return mask.bits + tile_.batch * mask.bits_batch_stride + tile_.head_kv * mask.bits_head_stride +
           tile_.m_block * Traits::kWarpgroups * mask.bits_block_stride + int64_t{number} * Traits::kBlockN;
  }

  // `count`: of the key tiles that the CTA has loaded before.
  CUTE_DEVICE void load_v(int number, int count, RowTile const& tile) {
    auto const state = at_use<Traits::kStages>(count);
    smem_.v_pipeline.wait_empty(state);  // all consumer warps have finished the product with this stage
    __syncwarp();
    if (is_first_lane()) {
      load_tile<typename Traits::ColumnsV>(
          args_.v, smem_.v_pipeline.expect(state, Traits::kVElements * int{sizeof(Element)}),
          TMA::CacheHintSm90::EVICT_LAST, smem_.v[state.stage], Traits::kBlockN, number * Traits::kBlockN,
          tile.head_kv, tile.batch);
    }
    __syncwarp();
  }

  KernelArgs const& args_;
  SharedStorage& smem_;
  RowTile tile_;
  VisitedTile first_;  // of the row tile
  KeyWalk<Traits::kWarpgroups> walk_;
  int count_ = 0;  // key tiles whose K has been loaded
};

}  // namespace flash_cute::sm90::forward::masked_rows
