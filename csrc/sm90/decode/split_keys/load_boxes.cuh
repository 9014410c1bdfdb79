// Tiles of a contiguous cache, and of pages of a multiple of 16 keys: a tile is loaded by TMA in boxes, each of rows of
// one page, and of a chunk of the columns. A lane has a box of rows, and some of its chunks.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/split_keys/work.cuh"
#include "sm90/common/pipeline.cuh"
#include "kernel_args.cuh"

namespace flash_cute::sm90::decode::split_keys {

using flash_cute::split_keys::Unit;

template <class Traits>
class BoxLoader {
 public:
  using Cache = typename Traits::Cache;
  static constexpr int kTileKeys = Traits::kTileKeys;
  static constexpr bool kByTma = true;
  static constexpr int kWarps = 1;  // that load a tile
  static constexpr int kTileArrivals = 1;

  CUTE_DEVICE BoxLoader(KernelArgs const& args, typename Traits::SharedStorage& smem, int warp)
      : args_(args),
        smem_(smem),
        map_(warp == 1 ? &args.v : &args.k),
        chunk_columns_(warp == 1 ? Traits::kChunkV : Traits::kChunkK),
        chunks_(warp == 1 ? Traits::kHeadDimV / Traits::kChunkV : Traits::kHeadDim / Traits::kChunkK),
        head_kv_(int(blockIdx.x) % args.params.heads_kv),
        boxes_(args.boxes),
        box_(int(threadIdx.x % 32) % args.boxes),
        chunk_(int(threadIdx.x % 32) / args.boxes),
        chunk_step_(args.chunk_step) {}

  // The lane's box of a tile. Of keys that no row sees no box is loaded, and no entry of the table read.
  struct Box {
    bool seen;
    int page;
    int row;
    int count;  // of all lanes' boxes
  };

  // The lanes look the pages of `chunk_step_` tiles up at once, as many tiles ahead: a lane those of its box.
  CUTE_DEVICE void look_up(Unit const& unit, int begin) {
    looked_up_ = box_of(unit, begin + chunk_);
    number_ = 0;
  }
  // Of each tile of a unit in turn.
  CUTE_DEVICE Box found(Unit const& unit, int tile) {
    Box box{.seen = is_seen(unit, tile)};
    int const lane = number_ * boxes_ + box_;
    box.page = __shfl_sync(0xffffffff, looked_up_.page, lane);
    box.row = __shfl_sync(0xffffffff, looked_up_.row, lane);
    if (number_ == 0) ahead_ = box_of(unit, tile + chunk_step_ + chunk_);
    if (++number_ == chunk_step_) {
      looked_up_ = ahead_;
      number_ = 0;
    }
    int const own_chunks = max(0, chunks_ - chunk_ + chunk_step_ - 1) / args_.chunk_step;
    box.count = __reduce_add_sync(0xffffffff, box.seen ? own_chunks : 0);
    return box;
  }

  // Pages that do not exist are outside of the map, and arrive as zeros.
  CUTE_DEVICE void load(Box const& box, PipelineState<Traits::kStages> state) {
    if (threadIdx.x % 32 == 0) {
      smem_.pipeline.expect(state, uint32_t(box.count * args_.box_rows * chunk_columns_ * sizeof(Cache)));
    }
    __syncwarp();
    if (!box.seen) return;
    for (int chunk = chunk_; chunk < chunks_; chunk += chunk_step_) {
      Cache* const tile = smem_.tiles[state.stage] + (chunk * kTileKeys + box_ * args_.box_rows) * chunk_columns_;
      SM90_TMA_LOAD_4D::copy(map_, &smem_.pipeline.full[state.stage], uint64_t(TMA::CacheHintSm90::EVICT_NORMAL), tile,
                             chunk * chunk_columns_, box.row, head_kv_, box.page);
    }
  }

 private:
  CUTE_DEVICE bool is_seen(Unit const& unit, int tile) const {
    int const key = tile * kTileKeys + box_ * args_.box_rows;
    return key + args_.box_rows > unit.seen_begin && key < unit.seen_end;
  }
  CUTE_DEVICE Box box_of(Unit const& unit, int tile) const {
    PageTable const& table = args_.params.table;
    int const key = tile * kTileKeys + box_ * args_.box_rows;
    Box box{.seen = is_seen(unit, tile)};
    if (!box.seen) return box;
    int const page = key / table.page_size;
    box.row = key - page * table.page_size;
    box.page = table.entries == nullptr ? unit.batch : __ldg(table.entries + unit.batch * table.stride + page);
    if (table.pages == 0) box.page = -1;  // the map has one
    return box;
  }

  KernelArgs const& args_;
  typename Traits::SharedStorage& smem_;
  CUtensorMap const* map_;
  int chunk_columns_;
  int chunks_;  // of a row
  int head_kv_;
  int boxes_;
  int box_;    // this lane's
  int chunk_;  // and first chunk
  int chunk_step_;
  Box looked_up_, ahead_;
  int number_ = 0;  // of the next tile among those looked up
};

}  // namespace flash_cute::sm90::decode::split_keys
