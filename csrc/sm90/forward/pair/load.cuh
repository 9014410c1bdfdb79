// What the producers of the forwards for large head dims share: the walk over row tiles, and TMA loads of boxes.
#pragma once

#include "sm90/forward/common/args.cuh"
#include "sm90/forward/common/sequence_scheduler.cuh"
#include "sm90/common/sequence_map.cuh"
#include "key_walk.cuh"

namespace flash_cute::sm90::forward::pair {

using forward::KernelArgs;

// What a row tile's loads have in common.
struct TileOrigin {
  int tile_number;
  int head;
  int head_kv;
  int first_row;
  SequenceOrigin rows;
  SequenceOrigin keys;
};

CUTE_DEVICE void load_box(CUtensorMap const& map, uint64_t* full, TMA::CacheHintSm90 hint, void* box, int column,
                          int row, int head, SequenceOrigin const& origin) {
  SM90_TMA_LOAD_5D::copy(&map, full, static_cast<uint64_t>(hint), box, column, origin.row + row, head, origin.last,
                         origin.back);
}

// A producer thread: loader.load(origin, walk) for each tile that schedule_sequences publishes.
template <class Traits, class Loader>
CUTE_DEVICE void produce(KernelArgs const& args, typename Traits::SharedStorage& smem, Loader loader) {
#pragma unroll 1
  for (int tile_number = 0;; ++tile_number) {
    smem.tile_pipeline.wait_full(at_step(tile_number));  // the scheduler has written the tile
    RowTile const& tile = smem.tile[tile_number & 1];
    if (tile.m_block < 0) break;
    Sequence const& sequence = tile.sequence;
    TileOrigin const from{.tile_number = tile_number,
                          .head = tile.head,
                          .head_kv = tile.head_kv,
                          .first_row = tile.m_block * Traits::kBlockM,
                          .rows = sequence_origin(args.params, tile, sequence.first_row, sequence.len_q),
                          .keys = sequence_origin(args.params, tile, sequence.first_key, sequence.len_k)};
    loader.load(from, key_walk(args.params, tile.keys.begin, tile.keys.end, tile.wave));
    smem.tile_pipeline.arrive_empty(at_step(tile_number));  // the scheduler may overwrite the tile
  }
}

}  // namespace flash_cute::sm90::forward::pair
