// Which tiles a CTA of the persistent grid works on, and in which order. Nothing is shared between CTAs:
// the assignment is a function of (CTA, grid, shapes).
//
// Tiles come in groups of heads. A mask that makes some rows longer than others takes as many heads as
// keep their keys and values in L2 together, and inside a group the longest tiles first, dealt to the CTAs
// forth and back (0..n-1, n-1..0, ...): the sums of two rounds are equal, and what is left at a group's end
// are its shortest tiles. Every other group starts dealing from the other side.
#pragma once

#include <algorithm>

#include <cute/tensor.hpp>

#include "../params.h"

namespace flash_cute::sm90 {

struct TileCoord {
  int m_block;
  int head;  // of q
  int batch;
};

struct TileSchedule {
  int num_m_blocks;
  int heads_q;
  int num_heads;   // batch * heads_q
  int group;       // heads a group
  bool longest_first;

  static constexpr int64_t kL2Budget = 32 << 20;  // bytes of K and V

  static TileSchedule make(FwdParams const& params, int block_m, bool longest_first) {
    int const num_heads = params.batch * params.heads_q;
    int64_t const kv_bytes = std::max<int64_t>(1, int64_t{4} * params.len_k * params.head_dim);
    int64_t const fitting = std::max<int64_t>(1, kL2Budget / kv_bytes) * (params.heads_q / params.heads_kv);
    // Groups alike, so that none ends in a short list, and an even number of them: dealing from the other side,
    // the second evens out what the first left.
    int64_t groups = longest_first ? (num_heads + fitting - 1) / fitting : 1;
    if (groups > 1) groups += groups % 2;
    return {.num_m_blocks = (params.len_q + block_m - 1) / block_m,
            .heads_q = params.heads_q,
            .num_heads = num_heads,
            .group = int((num_heads + groups - 1) / groups),
            .longest_first = longest_first};
  }

  CUTE_HOST_DEVICE int64_t num_tiles() const { return int64_t{num_m_blocks} * num_heads; }
};

// One CTA's walk through the schedule.
class TileIterator {
 public:
  CUTE_DEVICE explicit TileIterator(TileSchedule const& schedule) : schedule_(schedule) { settle(); }

  CUTE_DEVICE bool valid() const { return first_head_ < schedule_.num_heads; }

  CUTE_DEVICE void next() {
    ++round_;
    settle();
  }

  CUTE_DEVICE TileCoord tile() const {
    int m_block, head;
    if (schedule_.longest_first) {
      m_block = schedule_.num_m_blocks - 1 - position_ / heads_here();
      head = first_head_ + position_ % heads_here();
    } else {
      m_block = position_ % schedule_.num_m_blocks;
      head = position_ / schedule_.num_m_blocks;
    }
    return {m_block, head % schedule_.heads_q, head / schedule_.heads_q};
  }

 private:
  CUTE_DEVICE int heads_here() const { return cute::min(schedule_.group, schedule_.num_heads - first_head_); }

  // Turns (group, round) into a position in the group's list, passing on to the next group when this one
  // has none left.
  CUTE_DEVICE void settle() {
    int const ctas = gridDim.x;
    while (valid()) {
      bool const back = schedule_.longest_first && backwards_ != bool(round_ & 1);
      position_ = round_ * ctas + (back ? ctas - 1 - int(blockIdx.x) : int(blockIdx.x));
      if (position_ < heads_here() * schedule_.num_m_blocks) return;
      first_head_ += schedule_.group;
      round_ = 0;
      backwards_ = !backwards_;
    }
  }

  TileSchedule const& schedule_;
  int first_head_ = 0;
  int round_ = 0;
  int position_ = 0;
  bool backwards_ = false;
};

}  // namespace flash_cute::sm90
