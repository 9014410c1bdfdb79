// Types of the schedules' kernels: tile, MMAs, shared memory. All derive from those of the sm80 forward, whose layouts,
// copies and instructions they use; each differs in what shared memory holds, and split_kv in its MMAs.
#pragma once

#include "sm80/forward/rows/traits.cuh"
#include "tile.h"

namespace flash_cute::studies::schedules {

using namespace cute;

template <Schedule kSchedule, class Element, int kHeadDim>
struct SharedKvTraits : rows::Traits<Element, kHeadDim, tile_config(kSchedule, kHeadDim).tile> {
  struct SharedStorage {
    alignas(128) Element q[SharedKvTraits::kBlockM * kHeadDim];   // O in the epilogue
    alignas(128) Element kv[SharedKvTraits::kBlockN * kHeadDim];  // K and V in turn
  };
  using Storage = SharedStorage;
};

template <Schedule kSchedule, class Element, int kHeadDim>
struct SharedQkvTraits : rows::Traits<Element, kHeadDim, tile_config(kSchedule, kHeadDim).tile> {
  static_assert(SharedQkvTraits::kBlockM == 2 * SharedQkvTraits::kBlockN && SharedQkvTraits::kTile.q_in_regs);
  static constexpr int kKeyElements = SharedQkvTraits::kBlockN * kHeadDim;
  struct SharedStorage {
    alignas(128) Element q[SharedQkvTraits::kBlockM * kHeadDim];  // then K and V, each half of it; then O
  };
  using Storage = SharedStorage;
};

// The base has 64 rows whatever the schedule's own number, since it gives each warp rows of its own.
constexpr rows::TileConfig split_kv_base(rows::TileConfig tile) {
  tile.block_m = 16 * tile.warps;
  return tile;
}

template <Schedule kSchedule, class Element, int kHeadDim>
struct SplitKvTraits : rows::Traits<Element, kHeadDim, split_kv_base(tile_config(kSchedule, kHeadDim).tile)> {
  static constexpr rows::TileConfig kTile = tile_config(kSchedule, kHeadDim).tile;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kWarps = kTile.warps;
  static_assert(kWarps == 4 && kBlockN % (16 * kWarps) == 0 && (kBlockM == 32 || kBlockM == 64));

  // A warp has kWarpKeys neighbouring keys: of S as columns, of P and V as the depth of the product.
  static constexpr int kWarpKeys = kBlockN / kWarps;
  using Atom = MMA_Atom<MmaAtom<Element>>;
  using KeysOfS = Layout<Shape<_8, Int<kWarps>, Int<kWarpKeys / 8>>, Stride<_1, Int<kWarpKeys>, _8>>;
  using KeysOfP = Layout<Shape<_16, Int<kWarps>, Int<kWarpKeys / 16>>, Stride<_1, Int<kWarpKeys>, _16>>;
  using MmaS = TiledMMA<Atom, Layout<Shape<_1, Int<kWarps>, _1>>, Tile<_16, KeysOfS, _16>>;
  using MmaO = TiledMMA<Atom, Layout<Shape<_1, _1, Int<kWarps>>>, Tile<_16, _16, KeysOfP>>;
  // Which part of the sum of all warps each warp has in the epilogue.
  static constexpr int kRowTiles = kBlockM / 16, kColumnParts = kWarps / kRowTiles;
  using Mma = TiledMMA<Atom, Layout<Shape<Int<kRowTiles>, Int<kColumnParts>, _1>>,
                       Tile<Int<kBlockM>, Int<16 * kColumnParts>, _16>>;

  using SmemLayoutQ =
      decltype(tile_to_shape(typename SplitKvTraits::SmemLayoutAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>>{}));
  // Float, row after row, four neighbouring rows eight banks apart: (BLK_M, D)
  using SmemLayoutSum = decltype(composition(Swizzle<2, 3, __builtin_ctz(kHeadDim) - 3>{},
                                             Layout<Shape<Int<kBlockM>, Int<kHeadDim>>, Stride<Int<kHeadDim>, _1>>{}));

  struct Keys {
    alignas(128) Element k[SplitKvTraits::kStages * kBlockN * kHeadDim];
    alignas(128) Element v[SplitKvTraits::kStages * kBlockN * kHeadDim];
  };
  struct SharedStorage {
    alignas(128) Element q[kBlockM * kHeadDim];  // O in the epilogue
    union {
      Keys keys;
      alignas(128) float sum[kBlockM * kHeadDim];  // of the warps' parts of O, in the end
    };
    alignas(16) float row_parts[kBlockM][kWarps];  // of each warp: its maximum of a row; in the end its sum
    float row_offsets[kBlockM];                    // in the end: the rows' softmax.offset
  };
  using Storage = SharedStorage;
  static_assert(sizeof(SharedStorage::sum) <= sizeof(Keys));
};

// The types of a column tile are those of split_q's kernel with its columns for a head dim.
template <Schedule kSchedule, class Element_, int kHeadDim_>
struct TiledTraits
    : rows::Traits<Element_, tile_config(kSchedule, kHeadDim_).columns, tile_config(kSchedule, kHeadDim_).tile> {
  static constexpr TileConfig kConfig = tile_config(kSchedule, kHeadDim_);
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDim_;
  static constexpr int kBlockM = kConfig.tile.block_m, kBlockN = kConfig.tile.block_n, kStages = kConfig.tile.stages;
  static constexpr int kColumns = kConfig.columns, kOutColumns = kConfig.out_columns;
  static constexpr int kTiles = kHeadDim / kColumns;        // column tiles of Q and K
  static constexpr int kOutTiles = kOutColumns / kColumns;  // of V and O, of this CTA
  static constexpr int kAhead = kStages - 1;                // column tiles in flight
  static_assert(kHeadDim % kOutColumns == 0 && kOutColumns % kColumns == 0);
  static_assert(kAhead >= 1 && kAhead <= kTiles && kAhead <= kOutTiles);
  // A column tile has the same buffer in every key tile, so that no address depends on the buffer's number.
  static_assert(kTiles % kStages == 0 && kOutTiles % kStages == 0);

  using SmemLayoutQ = decltype(tile_to_shape(typename TiledTraits::SmemLayoutAtom{},
                                             Shape<Int<kBlockM>, Int<kColumns>, Int<kStages>>{}));
  // V's column tiles side by side: (BLK_N, columns, tile) and (columns, BLK_N, tile)
  template <int kCount>
  using SmemLayoutV = decltype(tile_to_shape(typename TiledTraits::SmemLayoutAtom{},
                                             Shape<Int<kBlockN>, Int<kColumns>, Int<kCount>>{}));
  template <int kCount>
  using SmemLayoutVt = decltype(composition(
      SmemLayoutV<kCount>{}, Layout<Shape<Int<kColumns>, Int<kBlockN>, Int<kCount>>,
                                    Stride<Int<kBlockN>, _1, Int<kBlockN * kColumns>>>{}));
};

template <Schedule kSchedule, class Element, int kHeadDim>
struct TiledQkTraits : TiledTraits<kSchedule, Element, kHeadDim> {
  struct SharedStorage {  // rings of q and k; O passes through q's in the end
    alignas(128) Element q[TiledQkTraits::kStages * TiledQkTraits::kBlockM * TiledQkTraits::kColumns];
    alignas(128) Element k[TiledQkTraits::kStages * TiledQkTraits::kBlockN * TiledQkTraits::kColumns];
    alignas(128) Element v[TiledQkTraits::kBlockN * kHeadDim];
  };
  using Storage = SharedStorage;
  static_assert(TiledQkTraits::kOutTiles == TiledQkTraits::kTiles);
};

template <Schedule kSchedule, class Element, int kHeadDim>
struct TiledQkvTraits : TiledTraits<kSchedule, Element, kHeadDim> {
  struct SharedStorage {  // rings; O passes through q's in the end
    alignas(128) Element q[TiledQkvTraits::kStages * TiledQkvTraits::kBlockM * TiledQkvTraits::kColumns];
    alignas(128) Element kv[TiledQkvTraits::kStages * TiledQkvTraits::kBlockN * TiledQkvTraits::kColumns];  // K or V
  };
  using Storage = SharedStorage;
};

template <Schedule kSchedule, class Element, int kHeadDim>
struct SelectTraits {
  using type = rows::Traits<Element, kHeadDim, tile_config(kSchedule, kHeadDim).tile>;
};
template <Schedule kSchedule, class Element, int kHeadDim>
  requires(divides_keys(kSchedule))
struct SelectTraits<kSchedule, Element, kHeadDim> {
  using type = SplitKvTraits<kSchedule, Element, kHeadDim>;
};
template <class Element, int kHeadDim>
struct SelectTraits<kSharedKv, Element, kHeadDim> {
  using type = SharedKvTraits<kSharedKv, Element, kHeadDim>;
};
template <class Element, int kHeadDim>
struct SelectTraits<kSharedQkv, Element, kHeadDim> {
  using type = SharedQkvTraits<kSharedQkv, Element, kHeadDim>;
};
template <class Element, int kHeadDim>
struct SelectTraits<kTiledQk, Element, kHeadDim> {
  using type = TiledQkTraits<kTiledQk, Element, kHeadDim>;
};
template <class Element, int kHeadDim>
struct SelectTraits<kTiledQkv, Element, kHeadDim> {
  using type = TiledQkvTraits<kTiledQkv, Element, kHeadDim>;
};

template <Schedule kSchedule, class Element, int kHeadDim>
using TraitsOf = typename SelectTraits<kSchedule, Element, kHeadDim>::type;

}  // namespace flash_cute::studies::schedules
