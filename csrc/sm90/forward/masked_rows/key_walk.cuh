// The key tiles that a row tile visits, word by word from the last to the first: the set bits of its warpgroups' lists.
// By a warp, of which each lane looks at a word of the lists, or at a key tile of a word.
#pragma once

#include <cute/tensor.hpp>

#include "contract/tile_mask.h"
#include "traits.cuh"

namespace flash_cute::sm90::forward::masked_rows {

template <int kWarpgroups>
class KeyWalk {
 public:
  CUTE_DEVICE void begin(TileMask const& mask, int batch, int head_kv, int m_block) {
    int const unit = m_block * kWarpgroups;
    units_ = min(kWarpgroups, mask.of_rows.lists - unit);
    list_ = batch * mask.row_list_batch_stride + head_kv * mask.row_list_head_stride +
            int64_t{unit} * mask.of_rows.words;
    chunk_ = (mask.of_rows.words + 31) / 32;
    words_ = 0;
  }

  // Goes on to the next word that has key tiles. Returns whether there is one.
  CUTE_DEVICE bool next_word(TileMask const& mask) {
    while (words_ == 0) {
      if (chunk_ == 0) return false;
      load_chunk(mask, --chunk_);
    }
    int const lane = 31 - __clz(words_);
    words_ ^= 1u << lane;
    load_word(mask, word_ = 32 * chunk_ + lane);
    return true;
  }

  // Of the word: its key tiles, what the lane's is to the warpgroups, and the last one, which comes first.
  CUTE_DEVICE uint32_t bits() const { return bits_; }
  CUTE_DEVICE uint32_t slot_word() const { return KeySlot::word_of(32 * word_ + int(threadIdx.x % 32), flags_); }
  CUTE_DEVICE uint32_t first_flags() const { return __shfl_sync(0xffffffff, flags_, 31 - __clz(bits_)); }

 private:
  // Finds the words of a chunk of 32 that are not 0.
  CUTE_DEVICE void load_chunk(TileMask const& mask, int chunk) {
    TileBits const& lists = mask.of_rows;
    int const word = 32 * chunk + int(threadIdx.x % 32);
    uint32_t any = 0;
    for (int unit = 0; unit < units_ && word < lists.words; ++unit) {
      any |= lists.visited[list_ + int64_t{unit} * lists.words + word];
    }
    words_ = __ballot_sync(0xffffffff, any != 0);
  }

  // Finds the flags of the 32 key tiles of a word.
  CUTE_DEVICE void load_word(TileMask const& mask, int word) {
    TileBits const& lists = mask.of_rows;
    int const lane = threadIdx.x % 32, unit = lane % kWarpgroups;
    uint32_t own = 0;  // of a warpgroup's list
    if (lane < 2 * kWarpgroups && unit < units_) {
      uint32_t const* const list = lane < kWarpgroups ? lists.visited : lists.whole;
      own = list[list_ + int64_t{unit} * lists.words + word];
    }
    flags_ = 0;
    CUTE_UNROLL
    for (int w = 0; w < kWarpgroups; ++w) {
      uint32_t const visited = __shfl_sync(0xffffffff, own, w);
      uint32_t const whole = __shfl_sync(0xffffffff, own, kWarpgroups + w);
      flags_ |= (visited >> lane & 1) * (KeyFlags::kSees << 2 * w) | (whole >> lane & 1) * (KeyFlags::kWhole << 2 * w);
    }
    bits_ = __ballot_sync(0xffffffff, flags_ != 0);
  }

  int64_t list_;    // of the row tile's first unit, in words
  int units_;       // lists of the row tile
  int chunk_;       // of 32 words, below which none has been looked at
  int word_;
  uint32_t words_;  // those of the chunk that are left
  uint32_t bits_;   // the key tiles of the word
  uint32_t flags_;  // of the lane's key tile of the word
};

}  // namespace flash_cute::sm90::forward::masked_rows
