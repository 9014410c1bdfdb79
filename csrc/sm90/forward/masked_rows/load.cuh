// The thread that loads Q, K and V by TMA: of the row tiles and key tiles that the walker finds. With K of a key tile
// comes what the next one is to each warpgroup, and where one needs the mask, the intervals of its columns, or the
// address of their bits.
#pragma once

#include "sm90/common/load_tma.cuh"
#include "sm90/forward/common/args.cuh"
#include "sm90/forward/common/scheduler.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::masked_rows {

template <class Traits>
class Loader {
 public:
  using SharedStorage = typename Traits::SharedStorage;
  using Element = typename Traits::Element;

  CUTE_DEVICE Loader(KernelArgs const& args, SharedStorage& smem) : args_(args), smem_(smem) {}

  CUTE_DEVICE void run() {
#pragma unroll 1
    for (int tile_number = 0;; ++tile_number) {
      smem_.tile_pipeline.wait_full(at_step(tile_number));
      TileCoord const volatile& tile = smem_.tile[tile_number & 1];
      tile_ = {.m_block = tile.m_block, .head = tile.head, .head_kv = tile.head_kv, .batch = tile.batch};
      if (tile_.m_block < 0) return;
      uint32_t word = next_word(), next = 0;
      if (word != 0) {
        next = next_word();
        load_k(word, next);
      }
      load_q(tile_number);
#pragma unroll 1
      while (next != 0) {
        uint32_t const before = word;
        word = next;
        next = next_word();
        load_k(word, next);
        load_v(before, count_ - 2);
      }
      if (word != 0) load_v(word, count_ - 1);
      smem_.tile_pipeline.arrive_empty(at_step(tile_number));
    }
  }

 private:
  struct RowTile {
    int m_block;
    int head;
    int head_kv;
    int batch;
  };

  // Of the next key tile, see KeyBatch.
  CUTE_DEVICE uint32_t next_word() {
    KeyBatch const volatile& batch = smem_.batches[batches_ & 1];
    if (left_ == 0) {
      smem_.batch_pipeline.wait_full(at_step(batches_));
      left_ = batch.number;
    }
    uint32_t const word = batch.words[--left_];
    if (left_ == 0) smem_.batch_pipeline.arrive_empty(at_step(batches_++));
    return word;
  }

  CUTE_DEVICE void load_q(int tile_number) {
#pragma unroll 1
    for (int wg = 0; wg < Traits::kWarpgroups; ++wg) {
      // The warpgroup's four warps have finished all GEMMs with the Q that was there.
      auto const state = Traits::q_state(tile_number);
      smem_.q_pipeline[wg].wait_empty(state);
      load_tile<typename Traits::ColumnsQK>(
          args_.q, smem_.q_pipeline[wg].expect(state, Traits::kQElements * int{sizeof(Element)}),
          TMA::CacheHintSm90::EVICT_FIRST, smem_.q[state.stage][wg], Traits::kRows,
          tile_.m_block * Traits::kBlockM + wg * Traits::kRows, tile_.head, tile_.batch);
    }
  }

  // `word`, `next`: of the key tile and of the one behind it.
  CUTE_DEVICE void load_k(uint32_t word, uint32_t next) {
    TileMask const& mask = args_.params.mask;
    constexpr int kBytes = Traits::kKElements * int{sizeof(Element)};
    constexpr int kIntervalBytes = Traits::kBlockN * int{sizeof(RowInterval)};
    int const number = KeySlot::number(word);
    auto const state = at_use<Traits::kStages>(count_++);
    // All consumer warps have finished S with what was in this stage, and have read its slot and intervals.
    smem_.k_pipeline.wait_empty(state);
    int const intervals = KeyFlags::some_masked(KeySlot::flags(word)) ? mask.intervals_per_column : 0;
    KeySlot volatile& published = smem_.slots[state.stage];
    published.word = KeySlot::word_of(number, KeySlot::flags(next));
    if (mask.bits != nullptr) published.bits = bits_of(number);
    uint64_t* const full = smem_.k_pipeline.expect(state, kBytes + intervals * kIntervalBytes);
    load_tile<typename Traits::ColumnsQK>(args_.k, full, TMA::CacheHintSm90::EVICT_LAST, smem_.k[state.stage],
                                          Traits::kBlockN, number * Traits::kBlockN, tile_.head_kv, tile_.batch);
    RowInterval const* from = mask.intervals + tile_.batch * mask.batch_stride + tile_.head_kv * mask.head_stride +
                              int64_t{number} * Traits::kBlockN;
    for (int n = 0; n < intervals; ++n, from += mask.interval_stride) {
      SM90_BULK_COPY_G2S::copy(from, full, smem_.intervals[state.stage][n], kIntervalBytes);
    }
  }

  // Of a key tile's columns and the row tile's first 64 rows.
  CUTE_DEVICE RowBits const* bits_of(int number) const {
    static_assert(Traits::kRows == kBitRows);
    TileMask const& mask = args_.params.mask;
    return mask.bits + tile_.batch * mask.bits_batch_stride + tile_.head_kv * mask.bits_head_stride +
           tile_.m_block * Traits::kWarpgroups * mask.bits_block_stride + int64_t{number} * Traits::kBlockN;
  }

  // `count`: of the key tiles that the CTA has loaded before.
  CUTE_DEVICE void load_v(uint32_t word, int count) {
    auto const state = at_use<Traits::kStages>(count);
    smem_.v_pipeline.wait_empty(state);  // all consumer warps have finished the product with this stage
    load_tile<typename Traits::ColumnsV>(
        args_.v, smem_.v_pipeline.expect(state, Traits::kVElements * int{sizeof(Element)}),
        TMA::CacheHintSm90::EVICT_LAST, smem_.v[state.stage], Traits::kBlockN,
        KeySlot::number(word) * Traits::kBlockN, tile_.head_kv, tile_.batch);
  }

  KernelArgs const& args_;
  SharedStorage& smem_;
  RowTile tile_;
  int count_ = 0;  // key tiles whose K has been loaded
  int batches_ = 0;  // whose words have all been read
  int left_ = 0;     // words of the batch
};

}  // namespace flash_cute::sm90::forward::masked_rows
