// The ring of slabs: all threads load them by cp.async, and all read them. Where the keys of a tile are is looked up
// once, for all slabs.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/tensor.hpp>

#include "core/registers.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::decode::streamed {

// Slabs are blocks of 64 columns, whose rows of 128 bytes have their eight vectors permuted by the row index, so that
// the eight rows of a matrix that ldmatrix reads lie in different banks.
CUTE_DEVICE int block_offset(int row, int vector) { return 64 * row + 8 * (vector ^ (row & 7)); }

template <class Element>
CUTE_DEVICE void copy_vector(Element* target, Element const* source, bool exists) {
  SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(*reinterpret_cast<uint128_t const*>(source),
                                                   *reinterpret_cast<uint128_t*>(target), exists);
}

// The slabs of the key tiles of a unit's pieces: of each tile those of K, then those of V.
template <class Traits>
class Ring {
 public:
  using Element = typename Traits::Element;

  CUTE_DEVICE Ring(DecodeParams const& params, Unit const& unit, Storage& smem, Element* slabs, int stages)
      : params_(params),
        unit_(unit),
        smem_(smem),
        slabs_(slabs),
        stages_(stages),
        load_tile_(unit.begin_of(unit.piece_begin)),
        placed_(load_tile_ + kPlacedTiles) {
    int const thread = threadIdx.x;
    if (thread < kPlacedTiles * kTileKeys) place(load_tile_ + thread / kTileKeys, thread % kTileKeys);
  }

  // Behind a barrier.
  CUTE_DEVICE void start() {
    for (int i = 0; i < stages_ - 1; ++i) load(i);
  }

  // Goes on to the next slab or the next two, at most `most`, and returns how many. Those before are no longer read.
  CUTE_DEVICE int advance(int most) {
    int const count = stages_ >= kStagesToSpareBarriers && most > 1 ? 2 : 1;
    wait(stages_ - read_ - count);
    __syncthreads();  // what all threads have loaded is there; and all have read the slabs before
    // Written over those of a tile whose slabs have all been loaded before the barrier; read behind the next one.
    if (placed_ < load_tile_ + kPlacedTiles) {
      if (threadIdx.x < kTileKeys) place(placed_, threadIdx.x);
      ++placed_;
    }
    int slot = slot_ < read_ ? slot_ - read_ + stages_ : slot_ - read_;
#pragma unroll 1
    for (int i = 0; i < read_; ++i) {
      load(slot);
      slot = following(slot);
    }
    read_ = count;
    return count;
  }

  // The next of these.
  CUTE_DEVICE Element const* slab() {
    Element const* const slab = slabs_ + slot_ * kSlabElements;
    slot_ = following(slot_);
    return slab;
  }

 private:
  CUTE_DEVICE int following(int slot) const { return slot + 1 == stages_ ? 0 : slot + 1; }

  // Until at most so many of the groups are on their way.
  CUTE_DEVICE static void wait(int groups) {
    switch (groups) {
      case 1: return cp_async_wait<1>();
      case 2: return cp_async_wait<2>();
      case 3: return cp_async_wait<3>();
      case 4: return cp_async_wait<4>();
      case 5: return cp_async_wait<5>();
      case 6: return cp_async_wait<6>();
      case 7: return cp_async_wait<7>();
      case 8: return cp_async_wait<8>();
      case 9: return cp_async_wait<9>();
      default: return cp_async_wait<10>();
    }
  }

  // Looks up a key. Those that no row sees and those of pages that do not exist are zeros, and nothing is read.
  CUTE_DEVICE void place(int tile, int row) {
    int const key = tile * kTileKeys + row;
    Place found{{-1, -1}};
    if (key >= unit_.seen_begin && key < unit_.seen_end) {
      int const index = key / params_.table.page_size;
      int const page = params_.table.entries == nullptr
                           ? unit_.batch
                           : __ldg(params_.table.entries + unit_.batch * params_.table.stride + index);
      if (unsigned(page) < unsigned(params_.table.pages)) {
        auto const offset = [&](CacheStrides const& strides) {
          return page * strides.page + unit_.head_kv * strides.head +
                 (key - index * params_.table.page_size) * strides.row;
        };
        found = {{offset(params_.k_strides), offset(params_.v_strides)}};
      }
    }
    smem_.places[tile % kPlacedTiles][row] = found;
  }

  // The next slab that is not on its way. Every call is a group of copies, also without any.
  CUTE_DEVICE void load(int slot) {
    if (load_tile_ < unit_.end_of(unit_.piece_end - 1)) {
      Element* const slab = slabs_ + slot * kSlabElements;
      int const of_values = load_index_ - key_slabs(params_.head_dim);
      bool const of_k = of_values < 0;
      bool const halves = Traits::kValueParts == 2 && params_.head_dim_v > Traits::kValueColumns;
      int const first_key = of_k ? 0 : (halves ? of_values / 2 : of_values) * Traits::kValueKeys;
      int const first_column = of_k ? load_index_ * kKeyColumns : halves ? of_values % 2 * Traits::kValueColumns : 0;
      copy_slab(slab, of_k, first_key, first_column);
      if (++load_index_ == tile_slabs(params_.head_dim, params_.head_dim_v, Traits::kHeadDimV)) {
        load_index_ = 0;
        ++load_tile_;
      }
    }
    cp_async_fence();
  }

  // Of K or of V, by the same instructions: of two branches the compiler issued both. Columns behind the head dim are
  // zeros.
  CUTE_DEVICE void copy_slab(Element* slab, bool of_k, int first_key, int first_column) const {
    constexpr int kCopies = kSlabElements / 8 / kThreads;
    int const columns = of_k ? kKeyColumns : Traits::kValueColumns;  // powers of two
    int const shift = of_k ? kLog2VectorsOfKeys : kLog2VectorsOfValues;
    unsigned const thread = fresh_thread_index();
    int const row = thread >> shift, rows_at_once = kThreads >> shift, vector = thread & (columns / 8 - 1);
    int const column = first_column + 8 * vector;
    bool const inside = column < (of_k ? params_.head_dim : params_.head_dim_v);
    auto const* const base = static_cast<Element const*>(of_k ? params_.k : params_.v) + column;
    Element* const block = slab + vector / 8 * (64 * kCopies) * rows_at_once;
    Place const* const places = smem_.places[load_tile_ % kPlacedTiles] + first_key + row;
    CUTE_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      int64_t const offset = places[i * rows_at_once].of[of_k ? 0 : 1];
      bool const exists = offset >= 0 && inside;
      copy_vector(block + block_offset(row + i * rows_at_once, vector % 8), base + (exists ? offset : 0), exists);
    }
  }

  static constexpr int log2(int x) { return x == 1 ? 0 : 1 + log2(x / 2); }
  static constexpr int kLog2VectorsOfKeys = log2(kKeyColumns / 8);
  static constexpr int kLog2VectorsOfValues = log2(Traits::kValueColumns / 8);

  DecodeParams const& params_;
  Unit const& unit_;
  Storage& smem_;
  Element* slabs_;
  int stages_;
  int load_tile_;       // of the next slab that is not on its way
  int load_index_ = 0;  // of that slab in its tile
  int placed_;          // before this tile keys have been looked up
  int slot_ = 0;        // of the next slab to read
  int read_ = 1;        // slabs since the last barrier: their slots are loaded next; at first one is empty
};

}  // namespace flash_cute::sm80::decode::streamed
