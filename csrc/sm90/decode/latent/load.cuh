// The producers load the key tiles of a bundle ahead, across the borders of pieces and sequences. How a tile is loaded
// is a type: BoxLoader, which is one warp, or RowCopier, of whose four warps each has a quarter of a tile's rows.
#pragma once

#include <new>

#include "core/split_keys/work.cuh"
#include "copy_rows.cuh"
#include "first_unit.cuh"
#include "kernel_args.cuh"
#include "load_boxes.cuh"
#include "ring.cuh"
#include "sm90/common/dependent_launch.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::latent {

template <class Traits, class Loader>
class Producer {
 public:
  // `warp`: of the producers; the first one finds the work.
  CUTE_DEVICE Producer(KernelArgs const& args, typename Traits::SharedStorage& smem, int warp)
      : args_(args), smem_(smem), lane_(threadIdx.x % 32), leads_(warp == 0), loader_(args, smem, warp) {}

  CUTE_DEVICE void find_work() {
    if (!leads()) return;
    Divisor const& heads = args_.params.heads_kv;
    Walk<Cut> const walk(args_.params, int(blockIdx.x) / heads, int(blockIdx.x) % heads);
    if (lane_ == 0) new (&this->walk()) Walk<Cut>(walk);
  }

  CUTE_DEVICE void run() {
    if (leads()) {
      lead();
    } else {
      follow();
    }
  }

 private:
  CUTE_DEVICE bool leads() const { return Loader::kWarps == 1 || leads_; }
  CUTE_DEVICE Walk<Cut>& walk() const { return reinterpret_cast<Walk<Cut>&>(smem_.walk); }
  CUTE_DEVICE Unit& unit() const { return smem_.units[unit_state_.stage]; }

  CUTE_DEVICE void lead() {
    bool recorded = false;
#pragma unroll 1
    while (publish_unit()) {
      load_unit(unit());
      if (!recorded) record(unit());
      recorded = true;
      unit_state_.advance();
    }
    if (!recorded) record(unit());  // of no rows
  }

  CUTE_DEVICE void follow() {
#pragma unroll 1
    for (;; unit_state_.advance()) {
      smem_.unit_pipeline.wait_full(unit_state_);
      if (unit().rows == 0) return;
      load_unit(unit());
      __syncwarp();
      smem_.unit_pipeline.release(unit_state_);
    }
  }

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

  // Gives the next unit to the other warps; one of no rows ends their work.
  CUTE_DEVICE bool publish_unit() {
    smem_.unit_pipeline.wait_empty(unit_state_);
    if (lane_ == 0) {
      if (walk().next()) {
        unit() = walk().unit();
      } else {
        unit().rows = 0;
      }
      smem_.unit_pipeline.publish(unit_state_);
    }
    __syncwarp();
    return unit().rows > 0;
  }

  CUTE_DEVICE void load_unit(Unit const& unit) {
    int const begin = unit.begin_of(unit.piece_begin), end = unit.end_of(unit.piece_end - 1);
    if (begin >= end) return;
    auto next = loader_.look_up(unit, begin);
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      auto const found = next;
      // Page numbers arrive during the wait for a stage.
      if (tile + 1 < end) next = loader_.look_up(unit, tile + 1);
      int const piece = (tile - unit.pieces.begin) / unit.pieces.tiles;
      int const warpgroup = (tile - unit.begin_of(piece)) % kWarpgroups;  // which computes the scores
      loader_.load(unit, tile, found, state_, warpgroup);
      state_.advance();
      if (tile + 1 < end) loader_.prefetch(next);
      launch_dependents();  // not before: beside it the instructions of this kernel would arrive later
    }
  }

  KernelArgs const& args_;
  typename Traits::SharedStorage& smem_;
  int lane_;
  bool leads_;
  Loader loader_;
  PipelineState<kStages> state_;
  PipelineState<2> unit_state_;
};

}  // namespace flash_cute::sm90::decode::latent
