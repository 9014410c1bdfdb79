// The producers: two threads load by TMA what the two consumer warpgroups read, each in the order in which its
// warpgroup reads it, through a ring of its own: K of the tiles whose scores the warpgroup computes, and its half of
// all V. The first one loads Q for both.
#pragma once

#include "../fwd/args.cuh"
#include "../sequence_map.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::fwd_large {

using fwd::KernelArgs;

template <class Traits, int kHalf>
struct Loader {
  using Element = typename Traits::Element;
  static constexpr int kChunk = Traits::kChunk;
  static constexpr uint32_t kUnitBytes = kUnitElements * sizeof(Element);

  KernelArgs const& args;
  typename Traits::SharedStorage& smem;
  PipelineState<Traits::kUnits> place{};

  // Waits until the unit that was in its place has been read.
  template <class LoadBoxes>
  CUTE_DEVICE void load_unit(LoadBoxes const& load_boxes) {
    auto& pipeline = smem.ring_pipeline[kHalf];
    pipeline.wait_empty(place);
    load_boxes(pipeline.expect(place, kUnitBytes), smem.ring[kHalf][place.stage]);
    place.advance();
  }

  CUTE_DEVICE static void load_box(CUtensorMap const& map, uint64_t* full, TMA::CacheHintSm90 hint, Element* box,
                                   int column, int row, int head, SequenceOrigin const& origin) {
    SM90_TMA_LOAD_5D::copy(&map, full, static_cast<uint64_t>(hint), box, column, origin.row + row, head, origin.last,
                           origin.back);
  }

  // Of Q and K.
  CUTE_DEVICE int first_column() const { return cta_rank<Traits>() * units_of_k<Traits>(args.params) * kUnitColumns; }

  CUTE_DEVICE void load_q(int draws, int row, int head, SequenceOrigin const& origin) {
    PipelineState<1> const state{0, draws & 1};
    smem.q_pipeline.wait_empty(state);  // all consumer warps have finished the last tile's S
    int const chunks = units_of_k<Traits>(args.params) * (kUnitColumns / kChunk);
    uint64_t* const full = smem.q_pipeline.expect(state, chunks * kBlockM * kChunk * sizeof(Element));
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      load_box(args.q, full, TMA::CacheHintSm90::EVICT_FIRST, smem.q + chunk * kBlockM * kChunk,
               first_column() + chunk * kChunk, row, head, origin);
    }
  }

  CUTE_DEVICE void load_k(int key, int head, SequenceOrigin const& origin) {
    int const units = units_of_k<Traits>(args.params);
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit) {
      load_unit([&](uint64_t* full, Element* buffer) {
        CUTE_UNROLL
        for (int column = 0; column < kUnitColumns; column += kChunk) {
          load_box(args.k, full, TMA::CacheHintSm90::EVICT_LAST, buffer + column * kBlockN,
                   first_column() + unit * kUnitColumns + column, key, head, origin);
        }
      });
    }
  }

  CUTE_DEVICE void load_v(int key, int head, SequenceOrigin const& origin) {
    int const first_column = cta_rank<Traits>() * kColumns + kHalf * Traits::kHalf;
#pragma unroll 1
    for (int unit = 0; unit < Traits::kUnitsOfV; ++unit) {
      load_unit([&](uint64_t* full, Element* buffer) {
        CUTE_UNROLL
        for (int column = 0; column < Traits::kHalf; column += kChunk) {
          load_box(args.v, full, TMA::CacheHintSm90::EVICT_LAST, buffer + column * kUnitKeys, first_column + column,
                   key + unit * kUnitKeys, head, origin);
        }
      });
    }
  }
};

// schedule_sequences publishes the tiles.
template <class Traits, int kHalf>
CUTE_DEVICE void producer(KernelArgs const& args, typename Traits::SharedStorage& smem) {
  bool const packed = args.params.sequences.cu_q != nullptr;
  Loader<Traits, kHalf> loader{args, smem};
#pragma unroll 1
  for (int draws = 0;; ++draws) {
    smem.tile_pipeline.wait_full(at_step(draws));  // the scheduler has written the tile
    fwd::SequenceTile const& tile = smem.tile[draws & 1];
    if (tile.m_block < 0) break;
    Sequence const& sequence = tile.sequence;
    auto const origin = [&](int first, int length) {
      return packed ? SequenceOrigin::packed(first, length) : SequenceOrigin::dense(tile.batch);
    };
    SequenceOrigin const keys = origin(sequence.first_key, sequence.len_k);
    int const last = tile.keys.end - 1, steps = tile.keys.end - tile.keys.begin;
    auto const load_k = [&](int i) { loader.load_k((last - i) * kBlockN, tile.head_kv, keys); };
    auto const load_v = [&](int i) { loader.load_v((last - i) * kBlockN, tile.head_kv, keys); };
    auto const load_q = [&] {
      loader.load_q(draws, tile.m_block * kBlockM, tile.head, origin(sequence.first_row, sequence.len_q));
    };
    auto const announce = [&] { smem.next_tile.publish({0, draws & 1}); };
    int const announced_at = max(0, (steps - 2) & ~1);  // one or two key tiles come after it
    if (kHalf == 0 && steps == 0) {
      announce();
      load_q();
    }
#pragma unroll 1
    for (int i = kHalf; i < steps; i += 2) {
      if (kHalf == 0 && i == announced_at) announce();
      load_k(i);
      if (kHalf == 0 && i == 0) load_q();
      if (i > 0) load_v(i - 1);
      load_v(i);
    }
    if (steps > 0 && (steps - 1) % 2 != kHalf) load_v(steps - 1);
    smem.tile_pipeline.arrive_empty(at_step(draws));  // the scheduler may overwrite the tile
  }
}

}  // namespace flash_cute::sm90::fwd_large
