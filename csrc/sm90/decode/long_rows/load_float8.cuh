// The warps that bring row tiles where the caches are of float8: one loads K, V and Q by TMA, one makes the numbers of
// K float16, and one those of V, which they then hand to the consumers.
//
// Sixteen lanes read 64 bytes each of two rows whose numbers differ in bits 0 and 2, so that TMA's swizzle has them in
// different banks.
#pragma once

#include "core/fp8.cuh"
#include "float8.cuh"
#include "load.cuh"

namespace flash_cute::sm90::decode::long_rows {

// See TilesAsStored: K and V, which have their own buffers.
template <class Traits>
class StoredTiles {
 public:
  using SharedStorage = typename Traits::SharedStorage;
  using Columns = typename Traits::Columns;
  using State = PipelineState<Traits::kStages>;
  static constexpr bool kLoadsQueries = true;
  static constexpr int kRowBytes = 2 * Traits::kHeadDim;

  CUTE_DEVICE StoredTiles(Float8Args const& args, SharedStorage& smem) : args_(args), smem_(smem) {}

  CUTE_DEVICE uint64_t& full(State state, bool /*whole*/) const { return smem_.stored_pipeline.full[state.stage]; }
  CUTE_DEVICE void wait_empty(State state) const { smem_.stored_pipeline.wait_empty(state); }
  CUTE_DEVICE void load(uint64_t& full, int stage, int, int row_in_tile, int row_in_page, int page, int head) const {
    auto const hint = uint64_t(TMA::CacheHintSm90::EVICT_LAST);
    int const offset = row_in_tile * Traits::kHeadDim;
    SM90_TMA_LOAD_4D::copy(&args_.k, &full, hint, smem_.stored_k[stage] + offset, 0, row_in_page, head, page);
    SM90_TMA_LOAD_4D::copy(&args_.v, &full, hint, smem_.stored_v[stage] + offset, 0, row_in_page, head, page);
  }
  CUTE_DEVICE void on_its_way(int, State, bool, ExistingKeys const&) const {}

 private:
  Float8Args const& args_;
  SharedStorage& smem_;
};

// Makes the numbers of key tiles float16.
template <class Traits, bool kValues>
class Widener {
 public:
  using SharedStorage = typename Traits::SharedStorage;
  using State = PipelineState<Traits::kStages>;
  static constexpr int kBlockN = Traits::kBlockN;

  CUTE_DEVICE Widener(Float8Params const& params, SharedStorage& smem)
      : smem_(smem), is_e5m2_(kValues ? params.v_is_e5m2 : params.k_is_e5m2) {}

  CUTE_DEVICE void run() {
#pragma unroll 1
    for (int tile_number = 0;; ++tile_number) {
      smem_.tile_pipeline.wait_full(at_step(tile_number));  // the scheduler has written the tile
      auto const volatile& tile = smem_.tile[tile_number & 1];
      if (tile.m_block < 0) return;
      int const begin = tile.keys.begin, end = tile.keys.end, count = tile.keys.count;
      ExistingKeys const keys = ExistingKeys::of<Traits>(tile);
      __syncwarp();  // all lanes have read the tile
      if (lane() == 0) smem_.tile_pipeline.arrive_empty(at_step(tile_number));
#pragma unroll 1
      for (int n = end - 1; n >= begin; --n) widen_tile(n, at_use<Traits::kStages>(count + end - 1 - n), keys);
    }
  }

 private:
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kWideRow = 128;           // bytes of a row of a chunk of float16 numbers
  static constexpr int kChunks = kHeadDim / 64;  // of those

  CUTE_DEVICE static int lane() { return fresh_thread_index() % 32; }
  CUTE_DEVICE auto& pipeline() const { return kValues ? smem_.v_pipeline : smem_.k_pipeline; }

  CUTE_DEVICE void widen_tile(int n, State state, ExistingKeys const& keys) const {
    smem_.stored_pipeline.wait_full(state);
    pipeline().wait_empty(state);  // all consumer warps have finished the GEMM with this stage
    if (is_e5m2_) {
      widen<true>(state.stage);
    } else {
      widen<false>(state.stage);
    }
    if (kValues && !keys.are_whole(n * kBlockN, kBlockN)) {
      __syncwarp();  // all lanes have written
      clear_values<kBlockN, kHeadDim>(smem_.v[state.stage], n, keys);
    }
    // WGMMA reads what was written, and TMA writes what was read.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane() == 0) {
      pipeline().publish(state);
      smem_.stored_pipeline.arrive_empty(state);
    }
  }

  // A lane has 8 bytes of a row of a chunk; of each eight rows it has two, of which it knows the second's places from
  // those of the first.
  template <bool kE5M2>
  CUTE_DEVICE void widen(int stage) const {
    constexpr int kGroups = 2;  // of eight rows, that are read before they are written
    static_assert(kBlockN % (8 * kGroups) == 0);
    constexpr int kFlipFrom = kHeadDim == 128 ? 32 : 16, kFlipTo = 32;  // swizzle, two rows below
    int const lane = this->lane();
    int const row = lane / 16 ^ lane / 8 % 2 * 5;  // of eight: 0, 5, 1 and 4
    int const vector = lane % 8 / 2;               // of 16 bytes, of a row of 64
    auto* const stored = reinterpret_cast<char const*>(kValues ? smem_.stored_v[stage] : smem_.stored_k[stage]);
    auto* const wide = reinterpret_cast<char*>(kValues ? smem_.v[stage] : smem_.k[stage]);
    int from = row * kHeadDim + (vector ^ (kHeadDim == 128 ? row : row / 2)) * 16 + lane % 2 * 8;
    int to = row * kWideRow + (lane % 8 ^ row) * 16;
#pragma unroll 1
    for (int begin = 0; begin < kBlockN; begin += 8 * kGroups) {
      uint2 bytes[kChunks][kGroups][2];
      auto const for_all = [&](auto const& f) {
        for_each(make_seq<kChunks>{}, [&](auto chunk) {
          for_each(make_seq<kGroups>{}, [&](auto group) {
            f(chunk, group, Int<0>{});
            f(chunk, group, Int<1>{});
          });
        });
      };
      for_all([&](int chunk, int group, int second) {
        int const place = (from ^ (chunk * 64 + second * kFlipFrom)) + (8 * group + 2 * second) * kHeadDim;
        bytes[chunk][group][second] = *reinterpret_cast<uint2 const*>(stored + place);
      });
      for_all([&](int chunk, int group, int second) {
        int const place = (to ^ second * kFlipTo) + (chunk * kBlockN + 8 * group + 2 * second) * kWideRow;
        uint2 const x = bytes[chunk][group][second];
        *reinterpret_cast<uint4*>(wide + place) = {float16_pair<kE5M2>(x.x), float16_pair<kE5M2, 1>(x.x),
                                                   float16_pair<kE5M2>(x.y), float16_pair<kE5M2, 1>(x.y)};
      });
      from += 8 * kGroups * kHeadDim;
      to += 8 * kGroups * kWideRow;
    }
  }

  SharedStorage& smem_;
  bool is_e5m2_;
};

template <class Result, int kHeadDim>
struct Producers<Float8Traits<Result, kHeadDim>> {
  using Traits = Float8Traits<Result, kHeadDim>;
  using Args = Float8Args;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr bool kByTma = true;
  static constexpr int kLoadingWarps = 3;
  static constexpr int kTileArrivals = 1;

  CUTE_DEVICE static void init(SharedStorage& smem) { smem.stored_pipeline.init(2); }
  // The roles of warps 0, 2 and 3.
  CUTE_DEVICE static void first(Args const& args, SharedStorage& smem) {
    Loader<Traits, /*kValues=*/false, Args, StoredTiles<Traits>>(args, smem).run();
  }
  CUTE_DEVICE static void second(Args const& args, SharedStorage& smem) {
    Widener<Traits, /*kValues=*/false>(args.params, smem).run();
  }
  CUTE_DEVICE static void third(Args const& args, SharedStorage& smem) {
    Widener<Traits, /*kValues=*/true>(args.params, smem).run();
  }
};

}  // namespace flash_cute::sm90::decode::long_rows
