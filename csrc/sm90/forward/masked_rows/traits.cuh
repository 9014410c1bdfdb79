// Types of one sm90 forward kernel with a mask: those of one without, and what comes with a key tile.
#pragma once

#include "contract/tile_mask.h"
#include "sm90/forward/rows/traits.cuh"
#include "tile.h"

namespace flash_cute::sm90::forward::masked_rows {

using namespace cute;

// What the loading thread tells of a key tile with its K. What it is to the warpgroups they know a step before: read
// when K has landed, the flags would delay the step. Its number and the next one's flags are one word: as two the
// kernel of head dim 96 with modified scores spilled.
struct KeySlot {
  uint32_t word;
  RowBits const* bits;  // of its columns and the row tile's first 64 rows, in global memory; not where there are none

  // Of the key tile, and flags of the next one; 0: this is the row tile's last.
  CUTE_DEVICE static uint32_t word_of(int number, uint32_t flags) { return uint32_t(number) << 8 | flags; }
  CUTE_DEVICE static int number(uint32_t word) { return int(word >> 8); }
  CUTE_DEVICE static uint32_t flags(uint32_t word) { return word & 0xff; }
};

// Key tiles on their way from the walker to the loading thread: word_of(number, flags of its own), or 0 behind the last
// of a row tile. The last word comes first.
struct KeyBatch {
  static constexpr int kMost = 16;
  uint32_t words[kMost];
  int number;
};

// What a key tile is to the warpgroups of its row tile, two bits for each.
struct KeyFlags {
  static constexpr uint32_t kSees = 1;   // some row of the warpgroup sees some column
  static constexpr uint32_t kWhole = 2;  // it needs no mask

  CUTE_HOST_DEVICE static constexpr uint32_t of(uint32_t flags, int warpgroup) { return flags >> 2 * warpgroup & 3; }

  // Whether some warpgroup needs the mask.
  CUTE_HOST_DEVICE static constexpr bool some_masked(uint32_t flags) { return (flags & ~(flags >> 1) & 0x55u) != 0; }
};
static_assert(KeyFlags::some_masked(0b01'11'00) && !KeyFlags::some_masked(0b11'00'11));

template <class Element, int kHeadDim, TileConfig kTile, Variant kVariant, int kHeadDimV>
struct Traits : rows::Traits<Element, kHeadDim, kTile, kVariant, kHeadDimV> {
  using Base = rows::Traits<Element, kHeadDim, kTile, kVariant, kHeadDimV>;
  using Base::kBlockN;
  using Base::kStages;
  using Base::kWarpgroups;

  static constexpr SmemBytes kSmem{kTile, kHeadDim, kHeadDimV};
  // Not in the modified kernels of three warpgroups: that of head dim 96 spilled, as that of 128 does without a mask.
  static constexpr bool kOutThroughSmem =
      kSmem.has_o && !(kVariant.modifies_scores && kTile.block_m == 192);
  // In a kernel that would spill otherwise: the bits of a mask are read where they are needed, not while S is computed,
  // and two places release K.
  static constexpr bool kSavesRegisters = kVariant.modifies_scores && kHeadDim == 96;
  static constexpr int kTileHeads = 1;
  static constexpr bool kComputesDescriptors = kHeadDim > 128;

  // With 24 registers the walker, a warp, spills.
  static constexpr int kProducerRegs = kWarpgroups > 2 ? 32 : 40;
  static constexpr int kConsumerRegs = kWarpgroups == 4 ? 112 : kWarpgroups == 3 ? 160 : 232;
  static_assert(kWarpgroups >= 2);

  struct alignas(1024) SharedStorage {
    Element k[kStages][Base::kKElements];
    Element v[kStages][Base::kVElements];
    Element q[kSmem.q_stages][kWarpgroups][Base::kQElements];
    [[no_unique_address]] std::conditional_t<kSmem.has_o, rows::OutBuffer<kWarpgroups, kHeadDimV>, rows::NoOutBuffer>
        out;
    alignas(128) RowInterval intervals[kStages][kMaxIntervals][kBlockN];  // of K's stage, where the mask is needed
    KeySlot slots[kStages];                            // the same
    Pipeline<kStages> k_pipeline;
    Pipeline<kStages> v_pipeline;
    Pipeline<kSmem.q_stages> q_pipeline[kWarpgroups];
    TileCoord tile[2];  // keys.count: key tiles that the CTA has loaded before; keys.end: the flags of the first
    Pipeline<2> tile_pipeline;
    KeyBatch batches[2];
    Pipeline<2> batch_pipeline;
  };
  static_assert(sizeof(SharedStorage) == kSmem.total);

  CUTE_DEVICE static PipelineState<kSmem.q_stages> q_state(int tile_number) {
    if constexpr (kSmem.q_stages == 2) {
      return at_step(tile_number);
    } else {
      return {0, tile_number & 1};
    }
  }
};

}  // namespace flash_cute::sm90::forward::masked_rows
