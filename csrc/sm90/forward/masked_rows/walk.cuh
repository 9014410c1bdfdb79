// The walker: a warp that schedules row tiles, and walks over the key tiles that they visit, ahead of the thread that
// loads. A ticket, a row tile's place in the order and the words of its lists are a chain of reads from global memory,
// as long as a step or two: in the loading thread each row tile began with it.
#pragma once

#include "core/registers.cuh"
#include "key_walk.cuh"
#include "sm90/common/warpgroup.cuh"
#include "sm90/forward/common/args.cuh"
#include "sm90/forward/common/scheduler.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::masked_rows {

template <class Traits>
class Walker {
 public:
  using SharedStorage = typename Traits::SharedStorage;

  CUTE_DEVICE Walker(FwdParams const& params, SharedStorage& smem) : params_(params), smem_(smem) {}

  CUTE_DEVICE void run() {
#pragma unroll 1
    for (int tile_number = 0; publish_tile(tile_number); ++tile_number) {
#pragma unroll 1
      for (bool found = found_; found; found = walk_.next_word(params_.mask)) publish_word();
      publish_batch(0, 0, 1);  // the end of the row tile
    }
  }

 private:
  static constexpr int kNowhere = 1 << 30;

  CUTE_DEVICE static int lane() { return threadIdx.x % 32; }

  // Finds the tile and its first word, and makes it known to the consumers and the loading thread. Returns whether
  // there is one.
  CUTE_DEVICE bool publish_tile(int tile_number) {
    smem_.tile_pipeline.wait_empty(at_step(tile_number));  // nobody reads the tile before the last any more
    __syncwarp();
    int index = dealt_number(fresh_block_index(), gridDim.x, tile_number);
    if (params_.draws_tiles && tile_number > 0) {
      if (lane() == 0) index = int(gridDim.x) + atomicAdd(params_.ticket, 1);
      index = uniform(index);
    }
    bool const exists = unsigned(index) < unsigned(params_.order.num_tiles());
    RowTileCoord const coord = params_.order.coord(exists ? index : 0);
    int const head_kv = coord.head / params_.order.heads_per_kv;
    int const m_block = exists ? sorted(coord.m_block, head_kv, coord.batch) : -1;
    TileCoord volatile& tile = smem_.tile[tile_number & 1];
    if (lane() == 0) {  // before the walk: registers do not keep them over it
      tile.m_block = m_block;
      tile.head = coord.head;
      tile.head_kv = head_kv;
      tile.batch = coord.batch;
    }
    found_ = false;
    if (exists) {
      walk_.begin(params_.mask, coord.batch, head_kv, m_block);
      found_ = walk_.next_word(params_.mask);
    }
    uint32_t const first_flags = found_ ? walk_.first_flags() : 0;
    if (lane() == 0) {
      tile.keys.end = int(first_flags);
      tile.keys.count = count_;
      smem_.tile_pipeline.publish(at_step(tile_number));
    }
    __syncwarp();
    return exists;
  }

  // The order has the last row tile of each head first; with a list, the one that visits the most key tiles.
  CUTE_DEVICE int sorted(int m_block, int head_kv, int batch) const {
    TileMask const& mask = params_.mask;
    if (mask.row_order == nullptr) return m_block;
    int const* const order =
        mask.row_order + batch * mask.row_order_batch_stride + head_kv * mask.row_order_head_stride;
    return order[params_.order.m_blocks - 1 - m_block];
  }

  // The key tiles of a word, the last one first.
  CUTE_DEVICE void publish_word() {
    // The lane's key tile has a place in one of two batches, if it is visited.
    int place = walk_.bits() >> lane() & 1 ? __popc(walk_.bits() >> lane() >> 1) : kNowhere;
    int left = __popc(walk_.bits());
    count_ += left;
    CUTE_NO_UNROLL
    for (; left > 0; left -= KeyBatch::kMost, place -= KeyBatch::kMost) {
      publish_batch(walk_.slot_word(), place, min(left, KeyBatch::kMost));
    }
  }

  // `word`, `place`: the lane's; it has none outside of [0, number).
  CUTE_DEVICE void publish_batch(uint32_t word, int place, int number) {
    smem_.batch_pipeline.wait_empty(at_step(batches_));
    __syncwarp();
    KeyBatch volatile& batch = smem_.batches[batches_ & 1];
    if (unsigned(place) < unsigned(number)) batch.words[number - 1 - place] = word;
    if (lane() == 0) batch.number = number;
    smem_.batch_pipeline.arrive_full(at_step(batches_++));
  }

  FwdParams const& params_;
  SharedStorage& smem_;
  KeyWalk<Traits::kWarpgroups> walk_;
  bool found_;     // the walk is at a word of the row tile
  int count_ = 0;  // key tiles of the row tiles before
  int batches_ = 0;
};

}  // namespace flash_cute::sm90::forward::masked_rows
