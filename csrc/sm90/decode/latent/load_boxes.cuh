// Key tiles of a contiguous cache, and of pages of a multiple of 16 keys: a warp loads them by TMA in boxes, each of
// rows of one page and of a chunk of the columns.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "sm90/common/warpgroup.cuh"
#include "sm90/decode/common/small_pages.h"
#include "kernel_args.cuh"
#include "ring.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::latent {

template <class Traits>
class BoxLoader {
 public:
  using Element = typename Traits::Element;
  using State = PipelineState<kStages>;
  static constexpr bool kByTma = true;
  static constexpr int kWarps = 1;
  static constexpr int kChunkArrivals = 1;

  CUTE_DEVICE BoxLoader(KernelArgs const& args, typename Traits::SharedStorage& smem, int /*warp*/)
      : args_(args),
        smem_(smem),
        lane_(threadIdx.x % 32),
        boxes_(args.boxes),
        head_(uniform(int(blockIdx.x) % args.params.heads_kv / args.shares)) {}

  // A box of a tile's rows, the lane's. Of keys that no row sees no box is loaded, and no entry of the table read.
  struct Box {
    bool seen;
    int page;
    int row;
  };
  CUTE_DEVICE Box look_up(Unit const& unit, int tile) const {
    PageTable const& table = args_.params.table;
    int const key = tile * kTileKeys + box_of_lane() * args_.box_rows;
    Box box{.seen = key + args_.box_rows > unit.seen_begin && key < unit.seen_end};
    if (!box.seen) return box;
    int const page = key / table.page_size;
    box.row = key - page * table.page_size;
    box.page = table.entries == nullptr ? unit.batch : __ldg(table.entries + unit.batch * table.stride + page);
    if (table.pages == 0) box.page = -1;  // the map has one
    return box;
  }

  CUTE_DEVICE void load(Unit const& unit, int tile, Box const& own, State state, int warpgroup) const {
    bool const whole = tile * kTileKeys >= unit.seen_begin && (tile + 1) * kTileKeys <= unit.seen_end;
    if (boxes_ == 1) {
      for_parts(warpgroup, [&](int part, int chunk, auto chunks) { load_boxes<1, chunks>(own, state, part, chunk); });
    } else if (boxes_ == 2 && whole) {
      for_parts(warpgroup, [&](int part, int chunk, auto chunks) { load_boxes<2, chunks>(own, state, part, chunk); });
    } else if (boxes_ == 4 && whole) {
      for_parts(warpgroup, [&](int part, int chunk, auto chunks) { load_boxes<4, chunks>(own, state, part, chunk); });
    } else {
      int const first_seen = max(0, (unit.seen_begin - tile * kTileKeys) / args_.box_rows);
      int const seen_end = min(boxes_, ceil_div(unit.seen_end - tile * kTileKeys, args_.box_rows));
      uint32_t const bytes = uint32_t(max(0, seen_end - first_seen) * args_.box_rows * kChunk * int(sizeof(Element)));
      for_parts(warpgroup, [&](int part, int chunk, auto chunks) {
        load_seen_boxes<chunks>(own, bytes, state, part, chunk);
      });
    }
  }

  // Into L2: a tile's place becomes free late, so that its load is waited for. The CTAs that read the same keys share
  // it.
  CUTE_DEVICE void prefetch(Box const& box) const {
    if (boxes_ > 1) return;
    int const share = uniform(int(blockIdx.x) % args_.params.heads_kv % args_.shares);
    int const row = uniform(box.row), page = uniform(box.page);
    if (cute::elect_one_sync()) {
      CUTE_UNROLL
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        if (chunk % args_.shares != share) continue;
        SM90_TMA_LOAD_4D::PREFETCH::copy(&args_.k, chunk * kChunk, row, head_, page);
      }
    }
    __syncwarp();
  }

 private:
  static constexpr int kMostBoxes = kTileKeys / kLeastBoxRows;

  CUTE_DEVICE int box_of_lane() const { return lane_ % args_.boxes; }

  // Of all boxes of a tile, lane i has box i. One elected lane loads them, from what is known as uniform: TMA takes
  // uniform registers, which a loop over the lanes would fill else, at a hundred cycles for each load.
  template <int kBoxes, int kCount>
  CUTE_DEVICE void load_boxes(Box const& own, State state, int part, int first_chunk) const {
    constexpr int kBoxRows = kTileKeys / kBoxes;
    int row = uniform(own.row), pages[kBoxes];
    CUTE_UNROLL
    for (int box = 0; box < kBoxes; ++box) pages[box] = __shfl_sync(0xffffffff, own.page, box);
    int const stage = uniform(state.stage), begin = uniform(first_chunk);
    wait_for(smem_.empty[stage][part], state.phase ^ 1);
    if (cute::elect_one_sync()) {
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        set_barrier_transaction_bytes(smem_.full[stage][begin + i], kChunkElements * int(sizeof(Element)));
      }
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        int row_of_box = row;
        CUTE_UNROLL
        for (int box = 0; box < kBoxes; ++box) {
          copy(stage, begin + i, box * kBoxRows, row_of_box, pages[box]);
          row_of_box += kBoxRows;  // a page has a multiple of these
          if (row_of_box >= args_.params.table.page_size) row_of_box = 0;
        }
      }
    }
    __syncwarp();
  }

  // Of a part of a tile: a lane loads its box of one chunk.
  template <int kCount>
  CUTE_DEVICE void load_seen_boxes(Box const& own, uint32_t bytes, State state, int part, int first_chunk) const {
    static_assert(kMostBoxes * kCount <= 32);
    wait_for(smem_.empty[state.stage][part], state.phase ^ 1);
    if (lane_ < kCount) set_barrier_transaction_bytes(smem_.full[state.stage][first_chunk + lane_], bytes);
    __syncwarp();
    if (lane_ >= boxes_ * kCount || !own.seen) return;
    copy(state.stage, first_chunk + lane_ / args_.boxes, box_of_lane() * args_.box_rows, own.row, own.page);
  }

  // Pages that do not exist are outside of the map, and arrive as zeros; so do columns behind the head dim.
  CUTE_DEVICE void copy(int stage, int chunk, int row_in_tile, int row_in_page, int page) const {
    Element* const target = smem_.tiles[stage] + chunk * kChunkElements + row_in_tile * kChunk;
    SM90_TMA_LOAD_4D::copy(&args_.k, &smem_.full[stage][chunk], uint64_t(TMA::CacheHintSm90::EVICT_NORMAL), target,
                           chunk * kChunk, row_in_page, head_, page);
  }

  KernelArgs const& args_;
  typename Traits::SharedStorage& smem_;
  int lane_;
  int boxes_;
  int head_;  // of the keys
};

}  // namespace flash_cute::sm90::decode::latent
