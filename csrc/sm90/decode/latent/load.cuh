// The producer: a warp loads the key tiles of a bundle by TMA, ahead across the borders of pieces and sequences. A tile
// comes in boxes, each of rows of one page and of a chunk of the columns.
#pragma once

#include <new>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/split_keys/work.cuh"
#include "first_unit.cuh"
#include "sm90/common/dependent_launch.cuh"
#include "sm90/common/warpgroup.cuh"
#include "ring.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::latent {

struct KernelArgs {
  DecodeParams params;  // a KV head is one of `shares`, see head_shares
  Divisor shares;
  int box_rows;   // divides the page size and the tile
  Divisor boxes;  // of a tile's rows
  CUtensorMap k;  // (column, row, head, page)
};

template <class Traits>
class Producer {
 public:
  using Element = typename Traits::Element;

  CUTE_DEVICE Producer(KernelArgs const& args, typename Traits::SharedStorage& smem)
      : args_(args),
        smem_(smem),
        lane_(threadIdx.x % 32),
        boxes_(args.boxes),
        head_(uniform(int(blockIdx.x) % args.params.heads_kv / args.shares)) {}

  CUTE_DEVICE void find_work() {
    Divisor const& heads = args_.params.heads_kv;
    Walk<Cut> const walk(args_.params, int(blockIdx.x) / heads, int(blockIdx.x) % heads);
    if (lane_ == 0) new (&this->walk()) Walk<Cut>(walk);
  }

  CUTE_DEVICE void run() {
    bool recorded = false;
#pragma unroll 1
    while (publish_unit()) {
      Unit const& unit = smem_.units[unit_state_.stage];
      load_unit(unit);
      if (!recorded) record(unit);
      recorded = true;
      unit_state_.advance();
    }
    if (!recorded) record(smem_.units[unit_state_.stage]);  // of no rows
  }

 private:
  CUTE_DEVICE Walk<Cut>& walk() const { return reinterpret_cast<Walk<Cut>&>(smem_.walk); }

  // For the merge: the unit with which the bundle begins.
  CUTE_DEVICE void record(Unit const& unit) const {
    Divisor const& heads = args_.params.heads_kv;
    int const bundle = int(blockIdx.x) / heads;
    if (int(blockIdx.x) % heads > 0) return;
    int* const words = reinterpret_cast<int*>(first_unit_of(args_.params, bundle));
    constexpr int kWords = sizeof(Unit) / sizeof(int);
    static_assert(kWords <= 32);
    if (lane_ < kWords) words[lane_] = reinterpret_cast<int const*>(&unit)[lane_];
    if (lane_ == 0) {
      auto const& ranges = walk().ranges();
      words[kWords] = walk().first();
      words[kWords + 1] = ranges.size;
      words[kWords + 2] = ranges.total;
    }
  }

  // Gives the next unit to the consumers; one of no rows ends their work.
  CUTE_DEVICE bool publish_unit() {
    smem_.unit_pipeline.wait_empty(unit_state_);
    Unit& unit = smem_.units[unit_state_.stage];
    if (lane_ == 0) {
      if (walk().next()) {
        unit = walk().unit();
      } else {
        unit.rows = 0;
      }
      smem_.unit_pipeline.publish(unit_state_);
    }
    __syncwarp();
    return unit.rows > 0;
  }

  CUTE_DEVICE void load_unit(Unit const& unit) {
    int const begin = unit.begin_of(unit.piece_begin), end = unit.end_of(unit.piece_end - 1);
    if (begin >= end) return;
    Box next = box_of(unit, begin, first_box());
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      Box const box = next;
      // Its page number arrives during the wait for a stage.
      if (tile + 1 < end) next = box_of(unit, tile + 1, first_box());
      int const piece = (tile - unit.pieces.begin) / unit.pieces.tiles;
      load(unit, tile, box, (tile - unit.begin_of(piece)) % kWarpgroups);  // the warpgroup that computes the scores
      if (tile + 1 < end) prefetch(next);
      launch_dependents();  // not before: beside it the instructions of this kernel would arrive later
    }
  }

  // A box of a tile's rows. Of keys that no row sees no box is loaded, and no entry of the table read.
  struct Box {
    bool seen;
    int page;
    int row;
  };
  CUTE_DEVICE int first_box() const { return lane_ % args_.boxes; }
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

  // In the order in which the scores are computed, see chunk_at. `first`: this lane's first box.
  CUTE_DEVICE void load(Unit const& unit, int tile, Box const& first, int warpgroup) {
    bool const whole = tile * kTileKeys >= unit.seen_begin && (tile + 1) * kTileKeys <= unit.seen_end;
    if (boxes_ == 1) {
      load_by_parts(warpgroup, [&](int part, int chunk, auto chunks) { load_boxes<1, chunks>(first, part, chunk); });
    } else if (boxes_ == 2 && whole) {
      load_by_parts(warpgroup, [&](int part, int chunk, auto chunks) { load_boxes<2, chunks>(first, part, chunk); });
    } else if (boxes_ == 4 && whole) {
      load_by_parts(warpgroup, [&](int part, int chunk, auto chunks) { load_boxes<4, chunks>(first, part, chunk); });
    } else {
      int const first_seen = max(0, (unit.seen_begin - tile * kTileKeys) / args_.box_rows);
      int const seen_end = min(boxes_, ceil_div(unit.seen_end - tile * kTileKeys, args_.box_rows));
      uint32_t const bytes = uint32_t(max(0, seen_end - first_seen) * args_.box_rows * kChunk * int(sizeof(Element)));
      load_by_parts(warpgroup, [&](int part, int chunk, auto chunks) {
        load_chunks(unit, tile, first, bytes, part, chunk, chunks);
      });
    }
    state_.advance();
  }

  // load_part(part, first chunk, chunks) for each part of a tile.
  template <class LoadPart>
  CUTE_DEVICE void load_by_parts(int warpgroup, LoadPart const& load_part) {
    load_part(warpgroup, warpgroup * kColumnChunks, C<kColumnChunks>{});
    load_part(kWarpgroups, kWarpgroups * kColumnChunks, C<1>{});
    load_part(1 - warpgroup, (1 - warpgroup) * kColumnChunks, C<kColumnChunks>{});
  }

  // Of all boxes of a tile, lane i has box i. One elected lane loads them, from what is known as uniform: TMA takes
  // uniform registers, which a loop over the lanes would fill else, at a hundred cycles for each load.
  template <int kBoxes, int kCount>
  CUTE_DEVICE void load_boxes(Box const& own, int part, int first_chunk) {
    constexpr int kBoxRows = kTileKeys / kBoxes;
    int row = uniform(own.row), pages[kBoxes];
    CUTE_UNROLL
    for (int box = 0; box < kBoxes; ++box) pages[box] = __shfl_sync(0xffffffff, own.page, box);
    int const stage = uniform(state_.stage), begin = uniform(first_chunk);
    wait_for(smem_.empty[stage][part], state_.phase ^ 1);
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

  // Pages that do not exist are outside of the map, and arrive as zeros; so do columns behind the head dim.
  CUTE_DEVICE void copy(int stage, int chunk, int row_in_tile, int row_in_page, int page) {
    Element* const target = smem_.tiles[stage] + chunk * kChunkElements + row_in_tile * kChunk;
    SM90_TMA_LOAD_4D::copy(&args_.k, &smem_.full[stage][chunk], uint64_t(TMA::CacheHintSm90::EVICT_NORMAL), target,
                           chunk * kChunk, row_in_page, head_, page);
  }

  // Those that are released together, as part `part`.
  CUTE_DEVICE void load_chunks(Unit const& unit, int tile, Box const& first, uint32_t bytes, int part, int first_chunk,
                               int chunks) {
    wait_for(smem_.empty[state_.stage][part], state_.phase ^ 1);
    if (lane_ < chunks) set_barrier_transaction_bytes(smem_.full[state_.stage][first_chunk + lane_], bytes);
    __syncwarp();
    for (int i = lane_; i < boxes_ * chunks; i += 32) {
      int const number = i % args_.boxes;
      Box const box = number == first_box() ? first : box_of(unit, tile, number);
      if (!box.seen) continue;
      copy(state_.stage, first_chunk + i / args_.boxes, number * args_.box_rows, box.row, box.page);
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

  KernelArgs const& args_;
  typename Traits::SharedStorage& smem_;
  int lane_;
  int boxes_;
  int head_;   // of the keys
  PipelineState<kStages> state_;
  PipelineState<2> unit_state_;
};

}  // namespace flash_cute::sm90::decode::latent
