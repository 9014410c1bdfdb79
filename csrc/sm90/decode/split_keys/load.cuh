// The producers: a warp loads the tiles of K of a bundle by TMA, another those of V, as many ahead as the ring has
// stages, across the borders of pieces and sequences. One alone is too slow where pages have 16 keys. A tile is loaded
// in boxes, each of rows of one page, and of a chunk of the columns. A lane has a box of rows, and some of its chunks.
// Of pages of few keys the lanes copy rows instead: copy_rows.cuh.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/split_keys/rows.cuh"
#include "core/split_keys/work.cuh"
#include "sm90/common/dependent_launch.cuh"
#include "sm90/common/pipeline.cuh"
#include "copy_rows.cuh"
#include "kernel_args.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::split_keys {

using flash_cute::split_keys::Unit;
using flash_cute::split_keys::Walk;

template <class Traits>
class Producer {
 public:
  using Cache = typename Traits::Cache;
  static constexpr int kTileKeys = Traits::kTileKeys;

  // `values`: loads V, else K.
  CUTE_DEVICE Producer(KernelArgs const& args, typename Traits::SharedStorage& smem, bool values)
      : args_(args),
        smem_(smem),
        values_(values),
        map_(values ? &args.v : &args.k),
        chunk_columns_(values ? Traits::kChunkV : Traits::kChunkK),
        chunks_(values ? Traits::kHeadDimV / Traits::kChunkV : Traits::kHeadDim / Traits::kChunkK),
        head_kv_(int(blockIdx.x) % args.params.heads_kv),
        boxes_(args.boxes),
        box_(int(threadIdx.x % 32) % args.boxes),
        chunk_(int(threadIdx.x % 32) / args.boxes),
        chunk_step_(args.chunk_step) {
    if (values) {  // tiles of K and V take stages by turns
      state_.advance();
      arriving_.advance();
    }
  }

  CUTE_DEVICE Walk<typename Traits::Cut> find_work() const {
    return {args_.params, int(blockIdx.x) / args_.params.heads_kv, head_kv_};
  }

  CUTE_DEVICE void run(Walk<typename Traits::Cut>& walk) {
    while (walk.next()) {
      if (values_) {
        prefetch_queries(walk.unit());
      } else {
        publish(walk.unit());
      }
      load_unit(walk.unit());
    }
    if (!values_) publish({});
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

  // Into L2, before the consumers ask for them behind the loads of all CTAs.
  CUTE_DEVICE void prefetch_queries(Unit const& unit) const {
    using flash_cute::split_keys::Row;
    constexpr int kLine = 128;
    for (int number = threadIdx.x % 32; number < unit.rows; number += 32) {
      auto const* const q = Row::of(args_.params, unit, number).query<typename Traits::Element>(args_.params, unit);
      for (int column = 0; column < args_.params.head_dim; column += kLine / int(sizeof(*q))) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(q + column));
      }
    }
  }

  CUTE_DEVICE void load_unit(Unit const& unit) {
    int const begin = unit.begin_of(unit.piece_begin), end = unit.end_of(unit.piece_end - 1);
    if (begin >= end) return;
    if (args_.copies_rows) return copy_unit(unit, begin, end);
    // The lanes look the pages of `chunk_step_` tiles up at once, as many tiles ahead: a lane those of its box.
    Box looked_up = box_of(unit, begin + chunk_), ahead;
    int number = 0;  // of the tile among those
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      Box box{.seen = is_seen(unit, tile)};
      int const lane = number * boxes_ + box_;
      box.page = __shfl_sync(0xffffffff, looked_up.page, lane);
      box.row = __shfl_sync(0xffffffff, looked_up.row, lane);
      if (number == 0) ahead = box_of(unit, tile + chunk_step_ + chunk_);
      if (++number == chunk_step_) {
        looked_up = ahead;
        number = 0;
      }
      load(box);
      launch_dependents();  // not before: beside it the instructions of this kernel would arrive later
    }
  }

  // A loop of its own: in one with the boxes, ptxas 13.0 predicated their TMA instruction, and it read a coordinate
  // that was not set.
  CUTE_DEVICE void copy_unit(Unit const& unit, int begin, int end) {
    RowCopier<Traits> const copier(args_.params, values_, head_kv_);
    auto ahead = copier.look_up(unit, begin);
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      auto const rows = ahead;
      ahead = copier.look_up(unit, tile + 1);
      if constexpr (Traits::kTilesInFlight > 0) wait_for_arrivals();
      smem_.pipeline.wait_empty(state_);
      copier.copy(rows, smem_.tiles[state_.stage]);
      wait_for_copies_at(smem_.pipeline.full[state_.stage]);
      smem_.pipeline.arrive_full(state_);
      state_.advance();
      state_.advance();
      launch_dependents();
    }
  }

  // The lane's box of a tile. Of keys that no row sees no box is loaded, and no entry of the table read.
  struct Box {
    bool seen;
    int page;
    int row;
  };
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

  // `box`: this lane's.
  CUTE_DEVICE void load(Box const& box) {
    int const own_chunks = max(0, chunks_ - chunk_ + chunk_step_ - 1) / args_.chunk_step;
    int const count = __reduce_add_sync(0xffffffff, box.seen ? own_chunks : 0);
    if constexpr (Traits::kTilesInFlight > 0) wait_for_arrivals();
    smem_.pipeline.wait_empty(state_);
    if (threadIdx.x % 32 == 0) {
      smem_.pipeline.expect(state_, uint32_t(count * args_.box_rows * chunk_columns_ * sizeof(Cache)));
    }
    __syncwarp();
    copy_box(box);
    state_.advance();
    state_.advance();
  }

  // Of the tiles before, all but the last ones have arrived.
  CUTE_DEVICE void wait_for_arrivals() {
    if (in_flight_ < Traits::kTilesInFlight) {
      ++in_flight_;
      return;
    }
    smem_.pipeline.wait_full(arriving_);
    arriving_.advance();
    arriving_.advance();
  }

  // Pages that do not exist are outside of the map, and arrive as zeros.
  CUTE_DEVICE void copy_box(Box const& box) {
    if (!box.seen) return;
    for (int chunk = chunk_; chunk < chunks_; chunk += chunk_step_) {
      Cache* const tile = smem_.tiles[state_.stage] + (chunk * kTileKeys + box_ * args_.box_rows) * chunk_columns_;
      SM90_TMA_LOAD_4D::copy(map_, &smem_.pipeline.full[state_.stage], uint64_t(TMA::CacheHintSm90::EVICT_NORMAL), tile,
                             chunk * chunk_columns_, box.row, head_kv_, box.page);
    }
  }

  KernelArgs const& args_;
  typename Traits::SharedStorage& smem_;
  bool values_;
  CUtensorMap const* map_;
  int chunk_columns_;
  int chunks_;  // of a row
  int head_kv_;
  int boxes_;
  int box_;         // this lane's
  int chunk_;       // and first chunk
  int chunk_step_;
  PipelineState<Traits::kStages> state_;
  PipelineState<Traits::kStages> arriving_;  // of the tile that was asked for first, of those that may be in flight
  int in_flight_ = 0;
  PipelineState<2> unit_state_;
};

}  // namespace flash_cute::sm90::decode::split_keys
