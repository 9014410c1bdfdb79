// The key tiles that a row tile visits, from the last to the first: those that a band crosses, or those that the lists
// of a mask name.
#pragma once

#include "core/mask.cuh"
#include "core/registers.cuh"
#include "core/tile_bits.cuh"
#include "sm80/common/load_cp_async.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::forward::rows {

// The kinds of key tiles. Only the last tile may reach past the end of the keys.
struct UpperEdge {  // at the band's upper edge, or at the end of the keys
  static constexpr bool kMasked = true;
  static constexpr RowCheck kRowCheck = RowCheck::kEach;
};
struct Whole {  // every row sees every key
  static constexpr bool kMasked = false;
  static constexpr RowCheck kRowCheck = RowCheck::kNone;
};
struct LowerEdge {  // at the band's lower edge
  static constexpr bool kMasked = true;
  static constexpr RowCheck kRowCheck = RowCheck::kNone;
};
struct Partial {  // of a mask: some row does not see some key
  static constexpr bool kMasked = true;
  static constexpr RowCheck kRowCheck = RowCheck::kEach;
};

// Those of a band.
template <class Traits, class Lengths>
struct BandTiles {
  typename Traits::Storage& smem;
  Lengths const& sequence;
  RowTileCoord const& tile;
  TileRange const range;

  CUTE_DEVICE BandTiles(FwdParams const&, Lengths const& sequence_, RowTileCoord const& tile_,
                        typename Traits::Storage& smem_)
      : smem(smem_), sequence(sequence_), tile(tile_), range(key_tiles()) {}

  CUTE_DEVICE bool empty() const { return range.begin == range.end; }
  CUTE_DEVICE int first() const { return range.end - 1; }
  CUTE_DEVICE bool has_next(int n) const { return n > begin(); }
  CUTE_DEVICE int next(int n) const { return n - 1; }

  // Calls step(n, stage, kind) for each tile. A mask in the loop of the whole ones, even behind a branch, costs 10 to
  // 20 %.
  template <class Step>
  CUTE_DEVICE void for_each(Step const& step) {
    constexpr int kToggle = Traits::kStages - 1;
    int n = range.end - 1, stage = 0;
    for (; n >= whole_end(); --n, stage ^= kToggle) step(n, stage, UpperEdge{});
    for (; n >= whole_begin(); --n, stage ^= kToggle) step(n, stage, Whole{});
    for (; n >= begin(); --n, stage ^= kToggle) step(n, stage, LowerEdge{});
  }

 private:
  // The tiles at the band's edges, recomputed at each use, or read again from shared memory: kept in registers, they
  // spilled. With eight warps the recomputation spilled too: they branch, which costs 1 %.
  static constexpr bool kBranches = Traits::kWarps == 8 && !Traits::kRereads;

  CUTE_DEVICE TileRange key_tiles() const {
    if constexpr (Traits::kRereads) {
      return smem.tile.keys;
    } else {
      return key_range<Traits::kBlockM, Traits::kBlockN>(sequence, tile.m_block);
    }
  }
  CUTE_DEVICE int begin() const {
    if constexpr (Traits::kRereads) return smem.tile.keys.begin;
    if (kBranches && !sequence.band.has_lower()) return 0;
    return first_column(sequence, opaque(tile.m_block) * Traits::kBlockM) / Traits::kBlockN;
  }
  CUTE_DEVICE int whole_begin() const {
    if constexpr (Traits::kRereads) return smem.tile.keys.whole_begin;
    if (kBranches && !sequence.band.has_lower()) return 0;
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    return ceil_div(first_column(sequence, opaque(tile.m_block) * kBlockM + (kBlockM - 1)), kBlockN);
  }
  CUTE_DEVICE int whole_end() const {
    if constexpr (Traits::kRereads) return smem.tile.keys.whole_end;
    return range.whole_end;
  }
};

// Those of a mask's lists. The tile after the present one is found when the present one begins.
template <class Traits>
struct MaskedTiles {
  typename Traits::Storage& smem;
  int const first_tile;
  int next_tile;

  CUTE_DEVICE MaskedTiles(FwdParams const& params, FwdParams const&, RowTileCoord const&,
                          typename Traits::Storage& smem_)
      : smem(smem_), first_tile(last_set_before(smem.tile.visited, 32 * params.mask.of_rows.words)), next_tile(-1) {}

  CUTE_DEVICE bool empty() const { return first_tile < 0; }
  CUTE_DEVICE int first() const { return first_tile; }
  CUTE_DEVICE bool has_next(int) const { return next_tile >= 0; }
  CUTE_DEVICE int next(int) const { return next_tile; }

  template <class Step>
  CUTE_DEVICE void for_each(Step const& step) {
    constexpr int kToggle = Traits::kStages - 1;
    for (int n = first_tile, stage = 0; n >= 0; n = next_tile, stage ^= kToggle) {
      next_tile = last_set_before(smem.tile.visited, n);
      if (is_set(smem.tile.whole, n)) {
        step(n, stage, Whole{});
      } else {
        step(n, stage, Partial{});
      }
    }
  }
};

template <class Traits, class Lengths>
using VisitedTiles = std::conditional_t<Traits::kVariant.reads_mask, MaskedTiles<Traits>, BandTiles<Traits, Lengths>>;

}  // namespace flash_cute::sm80::forward::rows
