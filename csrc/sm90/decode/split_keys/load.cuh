// The producer: one warp loads the tiles of K and V of a bundle by TMA, as many ahead as the ring has stages, across
// the borders of pieces and sequences. A tile is loaded in boxes, each of rows of one page; a lane loads a chunk of a
// box's columns.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/split_keys/work.cuh"
#include "sm90/common/pipeline.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::split_keys {

using flash_cute::split_keys::Unit;
using flash_cute::split_keys::Walk;

struct KernelArgs {
  DecodeParams params;
  int box_rows;  // divides the page size and the tile
  CUtensorMap k;  // (column, row, head, page)
  CUtensorMap v;
};

template <class Traits>
class Producer {
 public:
  using Cache = typename Traits::Cache;
  static constexpr int kTileKeys = Traits::kTileKeys;

  CUTE_DEVICE Producer(KernelArgs const& args, typename Traits::SharedStorage& smem)
      : args_(args),
        smem_(smem),
        head_kv_(blockIdx.x % args.params.heads_kv),
        boxes_(kTileKeys / args.box_rows),
        box_(int(threadIdx.x % 32) % boxes_),
        chunk_(int(threadIdx.x % 32) / boxes_) {}

  CUTE_DEVICE void run() {
    Walk<typename Traits::Cut> walk(args_.params, blockIdx.x / args_.params.heads_kv, head_kv_);
    while (walk.next()) {
      publish(walk.unit());
      load_unit(walk.unit());
    }
    publish({});
  }

 private:
  // Gives the unit to the consumers; one of no rows ends their work.
  CUTE_DEVICE void publish(Unit const& unit) {
    smem_.unit_pipeline.wait_empty(unit_state_);
    if (threadIdx.x % 32 == 0) {
      smem_.units[unit_state_.stage] = unit;
      smem_.unit_pipeline.publish(unit_state_);
    }
    unit_state_.advance();
  }

  CUTE_DEVICE void load_unit(Unit const& unit) {
    int const begin = unit.begin_of(unit.piece_begin), end = unit.end_of(unit.piece_end - 1);
    if (begin >= end) return;
    Box next = box_of(unit, begin);
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      Box const box = next;
      if (tile + 1 < end) next = box_of(unit, tile + 1);  // its page number arrives during the wait for a stage
      load<Traits::kHeadDim, Traits::kChunkK>(args_.k, box);
      load<Traits::kHeadDimV, Traits::kChunkV>(args_.v, box);
    }
  }

  // This lane's box of a tile. Of keys that no row sees no box is loaded, and no entry of the table read.
  struct Box {
    bool seen;
    int page;
    int row;
  };
  CUTE_DEVICE Box box_of(Unit const& unit, int tile) const {
    DecodeParams const& params = args_.params;
    int const key = tile * kTileKeys + box_ * args_.box_rows;
    Box box{.seen = key + args_.box_rows > unit.seen_begin && key < unit.seen_end};
    if (!box.seen) return box;
    int const page = key / params.table.page_size;
    box.row = key - page * params.table.page_size;
    box.page = params.table.entries == nullptr
                   ? unit.batch
                   : __ldg(params.table.entries + unit.batch * params.table.stride + page);
    return box;
  }

  // Pages that do not exist are outside of the map, and arrive as zeros.
  template <int kColumns, int kChunk>
  CUTE_DEVICE void load(CUtensorMap const& map, Box const& box) {
    bool const loads = box.seen && chunk_ < kColumns / kChunk;
    int const count = __popc(__ballot_sync(0xffffffff, loads));
    smem_.pipeline.wait_empty(state_);
    if (threadIdx.x % 32 == 0) smem_.pipeline.expect(state_, uint32_t(count * args_.box_rows * kChunk * sizeof(Cache)));
    __syncwarp();
    if (loads) {
      Cache* const tile = smem_.tiles[state_.stage] + (chunk_ * kTileKeys + box_ * args_.box_rows) * kChunk;
      SM90_TMA_LOAD_4D::copy(&map, &smem_.pipeline.full[state_.stage], uint64_t(TMA::CacheHintSm90::EVICT_NORMAL), tile,
                             chunk_ * kChunk, box.row, head_kv_, box.page);
    }
    state_.advance();
  }

  KernelArgs const& args_;
  typename Traits::SharedStorage& smem_;
  int head_kv_;
  int boxes_;  // of a tile's rows
  int box_;
  int chunk_;
  PipelineState<Traits::kStages> state_;
  PipelineState<2> unit_state_;
};

}  // namespace flash_cute::sm90::decode::split_keys
