// The portable ring of tiles of K and V: all warps load them by cp.async, two stages less ahead than there are, and all
// compute. A thread has 16 bytes of a row, and looks up the page of each.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/tensor.hpp>

#include "traits.cuh"
#include "core/split_keys/work.cuh"

namespace flash_cute::sm80::decode::split_keys {

using namespace cute;
using flash_cute::split_keys::Unit;

// The key tiles of a unit's pieces, each K and then V.
template <class Traits>
class CpAsyncRing {
 public:
  using Element = typename Traits::Element;
  static constexpr int kStages = Traits::kStages, kTileKeys = Traits::kTileKeys;
  // A buffer is filled again when all warps have passed two more waits: the tile of K may be read until V's is
  // released.
  static constexpr int kAhead = kStages - 2;

  CUTE_DEVICE CpAsyncRing(DecodeParams const& params, Unit const& unit, typename Traits::SharedStorage& smem)
      : params_(params),
        unit_(unit),
        smem_(smem),
        first_tile_(unit.begin_of(unit.piece_begin)),
        loads_(2 * (unit.end_of(unit.piece_end - 1) - first_tile_)) {
    for (int i = 0; i < kAhead; ++i) load(i);
  }

  CUTE_DEVICE Element const* wait_keys() { return wait(); }
  CUTE_DEVICE Element const* wait_values() { return wait(); }
  CUTE_DEVICE void release_keys() {}
  CUTE_DEVICE void release_values() {}

 private:
  CUTE_DEVICE Element const* wait() {
    cp_async_wait<kAhead - 1>();
    __syncthreads();  // what all threads have loaded is there; and all have read what the next load overwrites
    load(next_ + kAhead);
    return smem_.tiles[next_++ % kStages];
  }

  // Every call is a group of copies, also without any.
  CUTE_DEVICE void load(int i) {
    if (i < loads_) {
      Element* const tile = smem_.tiles[i % kStages];
      if (i % 2 == 0) {
        auto sK = make_tensor(make_smem_ptr(tile), typename Traits::SmemLayoutK{});  // (tile, D)
        load_tile(first_tile_ + i / 2, params_.k, params_.k_strides, params_.head_dim, sK);
      } else {
        auto sV = make_tensor(make_smem_ptr(tile), typename Traits::SmemLayoutV{});  // (tile, Dv)
        load_tile(first_tile_ + i / 2, params_.v, params_.v_strides, params_.head_dim_v, sV);
      }
    }
    cp_async_fence();
  }

  // Keys that no row sees, pages that do not exist and columns behind the head dim are zeros, and nothing is read.
  template <class Smem>
  CUTE_DEVICE void load_tile(int tile, void const* cache, CacheStrides const& strides, int head_dim,
                             Smem const& sX) const {  // (tile, D)
    using Chunk = SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>;
    constexpr int kChunks = decltype(size<1>(sX))::value / 8, kRowsAtOnce = 32 * kConsumerWarps / kChunks;
    static_assert(kTileKeys % kRowsAtOnce == 0);
    int const column = 8 * (threadIdx.x % kChunks);
    auto const* const base = static_cast<Element const*>(cache) + unit_.head_kv * strides.head;
    CUTE_UNROLL
    for (int i = 0; i < kTileKeys / kRowsAtOnce; ++i) {
      int const row = int(threadIdx.x) / kChunks + i * kRowsAtOnce, key = tile * kTileKeys + row;
      bool exists = key >= unit_.seen_begin && key < unit_.seen_end && column < head_dim;
      Element const* source = base;
      if (exists) {
        int const index = key / params_.table.page_size;
        int const page = params_.table.entries == nullptr
                             ? unit_.batch
                             : __ldg(params_.table.entries + unit_.batch * params_.table.stride + index);
        exists = unsigned(page) < unsigned(params_.table.pages);
        if (exists) source += page * strides.page + (key - index * params_.table.page_size) * strides.row + column;
      }
      Chunk::copy(*reinterpret_cast<uint128_t const*>(source), *reinterpret_cast<uint128_t*>(&sX(row, column)), exists);
    }
  }

  DecodeParams const& params_;
  Unit const& unit_;
  typename Traits::SharedStorage& smem_;
  int first_tile_;
  int loads_;
  int next_ = 0;
};

}  // namespace flash_cute::sm80::decode::split_keys
