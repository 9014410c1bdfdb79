// The producer: one thread loads Q, K and V of every tile into shared memory by TMA. K and V pass through one ring of
// units, in the order in which they are used: K(0), K(1), V(0), K(2), V(1), ..., where 0 is the last key tile.
#pragma once

#include "../../core/mask.cuh"
#include "../fwd/args.cuh"
#include "../sequence_map.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::fwd_large {

using fwd::KernelArgs;

template <class Traits>
struct Loader {
  using Element = typename Traits::Element;
  static constexpr int kChunk = Traits::kChunk;
  static constexpr uint32_t kUnitBytes = kUnitElements * sizeof(Element);

  KernelArgs const& args;
  typename Traits::SharedStorage& smem;
  RingPlace place{};

  // Waits until the unit of kUnits units ago has been read, and hands out its place.
  template <class LoadBoxes>
  CUTE_DEVICE void load_unit(LoadBoxes const& load_boxes) {
    smem.ring_pipeline.wait_empty(place);
    load_boxes(smem.ring_pipeline.expect(place, kUnitBytes), smem.ring[place.stage]);
    place.advance(1);
  }

  CUTE_DEVICE static void load_box(CUtensorMap const& map, uint64_t* full, TMA::CacheHintSm90 hint, Element* box,
                                   int column, int row, int head, SequenceOrigin const& origin) {
    SM90_TMA_LOAD_5D::copy(&map, full, static_cast<uint64_t>(hint), box, column, origin.row + row, head, origin.last,
                           origin.back);
  }

  CUTE_DEVICE void load_q(int draws, int row, int head, SequenceOrigin const& origin) {
    PipelineState<1> const state{0, draws & 1};
    smem.q_pipeline.wait_empty(state);  // all consumer warps have finished the last tile's S
    int const chunks = units_of_k(args.params) * (kUnitColumns / kChunk);
    uint64_t* const full = smem.q_pipeline.expect(state, chunks * kBlockM * kChunk * sizeof(Element));
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      load_box(args.q, full, TMA::CacheHintSm90::EVICT_FIRST, smem.q + chunk * kBlockM * kChunk, chunk * kChunk, row,
               head, origin);
    }
  }

  CUTE_DEVICE void load_k(int key, int head, SequenceOrigin const& origin) {
    int const units = units_of_k(args.params);
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit) {
      load_unit([&](uint64_t* full, Element* buffer) {
        CUTE_UNROLL
        for (int column = 0; column < kUnitColumns; column += kChunk) {
          load_box(args.k, full, TMA::CacheHintSm90::EVICT_LAST, buffer + column * kBlockN,
                   unit * kUnitColumns + column, key, head, origin);
        }
      });
    }
  }

  CUTE_DEVICE void load_v(int key, int head, SequenceOrigin const& origin) {
#pragma unroll 1
    for (int unit = 0; unit < 2 * Traits::kUnitsOfV; ++unit) {  // the two halves' by turns
      int const first_column = unit % 2 * Traits::kHalf, first_key = key + unit / 2 * kUnitKeys;
      load_unit([&](uint64_t* full, Element* buffer) {
        CUTE_UNROLL
        for (int column = 0; column < Traits::kHalf; column += kChunk) {
          load_box(args.v, full, TMA::CacheHintSm90::EVICT_LAST, buffer + column * kUnitKeys, first_column + column,
                   first_key, head, origin);
        }
      });
    }
  }
};

// schedule_sequences publishes the tiles.
template <class Traits>
CUTE_DEVICE void producer(KernelArgs const& args, typename Traits::SharedStorage& smem) {
  bool const packed = args.params.sequences.cu_q != nullptr;
  Loader<Traits> loader{args, smem};
#pragma unroll 1
  for (int draws = 0;; ++draws) {
    smem.tile_pipeline.wait_full(at_step(draws));  // the scheduler has written the tile
    fwd::SequenceTile const& tile = smem.tile[draws & 1];
    if (tile.m_block < 0) break;
    auto const announce = [&] { smem.next_tile.publish({0, draws & 1}); };
    Sequence const& sequence = tile.sequence;
    auto const origin = [&](int first, int length) {
      return packed ? SequenceOrigin::packed(first, length) : SequenceOrigin::dense(tile.batch);
    };
    SequenceOrigin const keys = origin(sequence.first_key, sequence.len_k);
    int const begin = tile.keys.begin, end = tile.keys.end;
    if (end - begin <= fwd::kTilesAhead) announce();
    if (end > begin) loader.load_k((end - 1) * kBlockN, tile.head_kv, keys);
    loader.load_q(draws, tile.m_block * kBlockM, tile.head, origin(sequence.first_row, sequence.len_q));
#pragma unroll 1
    for (int n = end - 1; n >= begin; --n) {
      if (n - begin == fwd::kTilesAhead) announce();
      if (n > begin) loader.load_k((n - 1) * kBlockN, tile.head_kv, keys);
      loader.load_v(n * kBlockN, tile.head_kv, keys);
    }
    smem.tile_pipeline.arrive_empty(at_step(draws));  // the scheduler may overwrite the tile
  }
}

}  // namespace flash_cute::sm90::fwd_large
