// The producers: they load the tiles of a bundle by TMA, as many ahead as the ring has stages, across the borders of pieces
// and sequences. A tile is loaded in boxes, each of rows of one page, and of a chunk of the columns. A lane has a box of
// rows, and some of its chunks; where pages are so small that there are more than 32 boxes, all chunks of several. Where a
// tile is one box of rows, a warp loads K and V by turns. Of more boxes it would be too slow: then another loads V.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/split_keys/work.cuh"
#include "sm90/common/dependent_launch.cuh"
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

  // Whether a second warp loads V.
  CUTE_DEVICE static bool shares_work(KernelArgs const& args) { return args.box_rows < kTileKeys; }

  // `second`: the warp that loads V alone.
  CUTE_DEVICE Producer(KernelArgs const& args, typename Traits::SharedStorage& smem, bool second)
      : args_(args),
        smem_(smem),
        loads_keys_(!second),
        loads_values_(second || !shares_work(args)),
        head_kv_(blockIdx.x % args.params.heads_kv),
        boxes_(kTileKeys / args.box_rows),
        box_(int(threadIdx.x % 32) % boxes_),
        chunk_(int(threadIdx.x % 32) / boxes_),
        chunk_step_(max(1, 32 / boxes_)) {}

  CUTE_DEVICE Walk<typename Traits::Cut> find_work() const {
    return {args_.params, int(blockIdx.x) / args_.params.heads_kv, head_kv_};
  }

  CUTE_DEVICE void run(Walk<typename Traits::Cut>& walk) {
    while (walk.next()) {
      if (loads_keys_) publish(walk.unit());
      load_unit(walk.unit());
    }
    if (loads_keys_) publish({});
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
    Box next = box_of(unit, begin, box_);
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      Box const box = next;
      // Its page number arrives during the wait for a stage.
      if (tile + 1 < end) next = box_of(unit, tile + 1, box_);
      // Tiles of K and V take stages by turns.
      if (loads_keys_) load(unit, tile, box, args_.k, Traits::kChunkK, Traits::kHeadDim / Traits::kChunkK);
      state_.advance();
      if (loads_values_) load(unit, tile, box, args_.v, Traits::kChunkV, Traits::kHeadDimV / Traits::kChunkV);
      state_.advance();
      launch_dependents();  // not before: beside it the instructions of this kernel would arrive later
    }
  }

  // A box of a tile. Of keys that no row sees no box is loaded, and no entry of the table read.
  struct Box {
    bool seen;
    int page;
    int row;
  };
  CUTE_DEVICE Box box_of(Unit const& unit, int tile, int number) const {
    PageTable const& table = args_.params.table;
    int const key = tile * kTileKeys + number * args_.box_rows;
    Box box{.seen = key + args_.box_rows > unit.seen_begin && key < unit.seen_end};
    if (!box.seen) return box;
    int const page = key / table.page_size;
    box.row = key - page * table.page_size;
    box.page = table.entries == nullptr ? unit.batch : __ldg(table.entries + unit.batch * table.stride + page);
    if (table.pages == 0) box.page = -1;  // the map has one
    return box;
  }

  // A tile of `chunks` chunks of columns. `first`: this lane's first box.
  CUTE_DEVICE void load(Unit const& unit, int tile, Box const& first, CUtensorMap const& map, int chunk_columns,
                        int chunks) {
    int const own_chunks = max(0, ceil_div(chunks - chunk_, chunk_step_));
    int count = first.seen ? own_chunks : 0;
    for (int number = box_ + 32; number < boxes_; number += 32) {
      if (box_of(unit, tile, number).seen) count += own_chunks;
    }
    count = __reduce_add_sync(0xffffffff, count);
    smem_.pipeline.wait_empty(state_);
    if (threadIdx.x % 32 == 0) smem_.pipeline.expect(state_, uint32_t(count * args_.box_rows * chunk_columns * sizeof(Cache)));
    __syncwarp();
    // Pages that do not exist are outside of the map, and arrive as zeros.
    auto const copy_box = [&](Box const& box, int number) {
      if (!box.seen) return;
      for (int chunk = chunk_; chunk < chunks; chunk += chunk_step_) {
        Cache* const rows = smem_.tiles[state_.stage] + (chunk * kTileKeys + number * args_.box_rows) * chunk_columns;
        SM90_TMA_LOAD_4D::copy(&map, &smem_.pipeline.full[state_.stage], uint64_t(TMA::CacheHintSm90::EVICT_NORMAL), rows,
                               chunk * chunk_columns, box.row, head_kv_, box.page);
      }
    };
    copy_box(first, box_);
    for (int number = box_ + 32; number < boxes_; number += 32) {
      copy_box(box_of(unit, tile, number), number);
    }
  }

  KernelArgs const& args_;
  typename Traits::SharedStorage& smem_;
  bool loads_keys_;
  bool loads_values_;
  int head_kv_;
  int boxes_;  // of a tile's rows
  int box_;         // this lane's first one
  int chunk_;       // and first chunk
  int chunk_step_;  // to its next chunk
  PipelineState<Traits::kStages> state_;
  PipelineState<2> unit_state_;
};

}  // namespace flash_cute::sm90::decode::split_keys
