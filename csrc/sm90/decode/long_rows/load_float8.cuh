// The warps that load row tiles where the caches are of float8: one loads K, one V, and a third Q.
//
// A warp asks TMA for a key tile, and while that is on its way makes float16 numbers of the one before, which it hands
// to the consumers. So of each it has two stages, as the consumers have. Sixteen lanes read 64 bytes each of two rows
// whose numbers differ in bits 0 and 2, so that TMA's swizzle has them in different banks.
#pragma once

#include "core/convert.cuh"
#include "core/fp8.cuh"
#include "float8.cuh"
#include "load.cuh"

namespace flash_cute::sm90::decode::long_rows {

// See TilesAsStored.
template <class Traits, bool kValues>
class TilesOfFloat8 {
 public:
  using SharedStorage = typename Traits::SharedStorage;
  using Columns = typename Traits::Columns;
  using State = PipelineState<Traits::kStages>;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr bool kLoadsQueries = false;

  CUTE_DEVICE TilesOfFloat8(Float8Args const& args, SharedStorage& smem) : args_(args), smem_(smem) {}

  CUTE_DEVICE Float8* buffer(int stage) const { return kValues ? smem_.stored_v[stage] : smem_.stored_k[stage]; }
  CUTE_DEVICE uint64_t& full(State state, bool /*whole*/) const { return stored().full[state.stage]; }
  CUTE_DEVICE void wait_empty(State) const {}  // this warp has read what was there

  CUTE_DEVICE void on_its_way(SequenceTile const volatile& tile, int n, State, bool, ExistingKeys const& keys) const {
    if (n + 1 < tile.keys.end) widen(tile, n + 1, keys);
  }
  CUTE_DEVICE void finish(SequenceTile const volatile& tile, ExistingKeys const& keys) const {
    widen(tile, tile.keys.begin, keys);
  }

 private:
  static_assert(Traits::kStages == 2);
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kWideRow = 128;           // bytes of a row of a chunk of float16 numbers
  static constexpr int kChunks = kHeadDim / 64;  // of those

  CUTE_DEVICE auto& stored() const { return kValues ? smem_.stored_v_pipeline : smem_.stored_k_pipeline; }
  CUTE_DEVICE auto& pipeline() const { return kValues ? smem_.v_pipeline : smem_.k_pipeline; }

  CUTE_DEVICE void widen(SequenceTile const volatile& tile, int n, ExistingKeys const& keys) const {
    State const state = at_use<Traits::kStages>(tile.keys.count + tile.keys.end - 1 - n);
    stored().wait_full(state);
    pipeline().wait_empty(state);  // all consumer warps have finished the GEMM with this stage
    if (kValues ? args_.params.v_is_e5m2 : args_.params.k_is_e5m2) {
      widen<true>(state.stage);
    } else {
      widen<false>(state.stage);
    }
    if (kValues && !keys.are_whole(n * kBlockN, kBlockN)) {
      __syncwarp();  // all lanes have written
      clear_values<kBlockN, kHeadDim>(smem_.v[state.stage], n, keys);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // WGMMA reads them
    __syncwarp();
    if (fresh_thread_index() % 32 == 0) pipeline().publish(state);
  }

  // A lane has 8 bytes of a row of a chunk; of each eight rows it has two, of which it knows the second's places from
  // those of the first.
  template <bool kE5M2>
  CUTE_DEVICE void widen(int stage) const {
    constexpr int kGroups = Traits::kProducerRegs < 56 ? 1 : 2;  // of eight rows, that are read before they are written
    static_assert(kBlockN % (8 * kGroups) == 0);
    constexpr int kFlipFrom = kHeadDim == 128 ? 32 : 16, kFlipTo = 32;  // swizzle, two rows below
    int const lane = fresh_thread_index() % 32;
    int const row = lane / 16 ^ lane / 8 % 2 * 5;  // of eight: 0, 5, 1 and 4
    int const vector = lane % 8 / 2;               // of 16 bytes, of a row of 64
    auto* const stored = reinterpret_cast<char const*>(buffer(stage));
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

  Float8Args const& args_;
  SharedStorage& smem_;
};

// Loads Q. What is not in float16 becomes so in place, the more exact of the two for scores of float16 keys.
template <class Traits>
class Float8Queries {
 public:
  using SharedStorage = typename Traits::SharedStorage;
  using Stored = typename Traits::Result;
  static constexpr bool kConverts = !std::is_same_v<Stored, cutlass::half_t>;

  CUTE_DEVICE Float8Queries(Float8Args const& args, SharedStorage& smem) : args_(args), smem_(smem) {}

  CUTE_DEVICE void run() {
    int const lane = fresh_thread_index() % 32;
#pragma unroll 1
    for (int tile_number = 0;; ++tile_number) {
      smem_.tile_pipeline.wait_full(at_step(tile_number));  // the scheduler has written the tile
      auto const& tile = smem_.tile[tile_number & 1];
      if (tile.m_block < 0) return;
      auto const state = Traits::q_state(tile_number);
#pragma unroll 1
      for (int wg = 0; wg < Traits::kWarpgroups && lane == 0; ++wg) {
        // The warpgroup's four warps have finished all GEMMs with the Q that was there.
        smem_.q_pipeline[wg].wait_empty(state);
        load(tile, wg, state, tile_number);
      }
      __syncwarp();  // all lanes have read the tile
      if (lane == 0) smem_.tile_pipeline.arrive_empty(at_step(tile_number));
      if constexpr (kConverts) {
#pragma unroll 1
        for (int wg = 0; wg < Traits::kWarpgroups; ++wg) convert_to_float16(wg, state, tile_number);
      }
    }
  }

 private:
  template <class State>
  CUTE_DEVICE void load(SequenceTile const& tile, int warpgroup, State state, int tile_number) const {
    int const bytes = query_bytes<Traits>(tile);
    uint64_t* const full = kConverts ? smem_.stored_q_pipeline[warpgroup].expect({0, tile_number & 1}, bytes)
                                     : smem_.q_pipeline[warpgroup].expect(state, bytes);
    load_queries<Traits>(args_, smem_, tile, warpgroup, full, state.stage);
  }

  template <class State>
  CUTE_DEVICE void convert_to_float16(int warpgroup, State state, int tile_number) const {
    int const lane = fresh_thread_index() % 32;
    auto* const vectors = reinterpret_cast<uint4*>(smem_.q[state.stage][warpgroup]);
    smem_.stored_q_pipeline[warpgroup].wait_full({0, tile_number & 1});
#pragma unroll 1
    for (int i = lane; i < Traits::kQElements / 8; i += 32) {
      uint4 const x = vectors[i];
      vectors[i] = {in_float16<Stored>(x.x), in_float16<Stored>(x.y), in_float16<Stored>(x.z), in_float16<Stored>(x.w)};
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // WGMMA reads them
    __syncwarp();
    if (lane == 0) smem_.q_pipeline[warpgroup].publish(state);
  }

  Float8Args const& args_;
  SharedStorage& smem_;
};

template <class Result, int kHeadDim>
struct Producers<Float8Traits<Result, kHeadDim>> {
  using Traits = Float8Traits<Result, kHeadDim>;
  using Args = Float8Args;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kLoadingWarps = 3;

  CUTE_DEVICE static void init(SharedStorage& smem) {
    smem.stored_k_pipeline.init(1);
    smem.stored_v_pipeline.init(1);
    for (auto& pipeline : smem.stored_q_pipeline) pipeline.init(1);
  }
  CUTE_DEVICE static void load_keys(Args const& args, SharedStorage& smem) {
    Loader<Traits, /*kValues=*/false, Args, TilesOfFloat8<Traits, false>>(args, smem).run();
  }
  CUTE_DEVICE static void load_values(Args const& args, SharedStorage& smem) {
    Loader<Traits, /*kValues=*/true, Args, TilesOfFloat8<Traits, true>>(args, smem).run();
  }
  CUTE_DEVICE static void load_queries(Args const& args, SharedStorage& smem) {
    Float8Queries<Traits>(args, smem).run();
  }
};

}  // namespace flash_cute::sm90::decode::long_rows
