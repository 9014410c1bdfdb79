// The producers: a warp loads the tiles of K of a bundle, another those of V, as many ahead as the ring has stages,
// across the borders of pieces and sequences. One alone is too slow where pages have 16 keys. How a tile is loaded is a
// type: BoxLoader, or RowCopier, which has two warps for each tile where a CTA has the registers.
#pragma once

#include "core/split_keys/rows.cuh"
#include "core/split_keys/work.cuh"
#include "sm90/common/dependent_launch.cuh"
#include "sm90/common/pipeline.cuh"
#include "copy_rows.cuh"
#include "kernel_args.cuh"
#include "load_boxes.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::split_keys {

using flash_cute::split_keys::Walk;

template <class Traits, class Loader>
class Producer {
 public:
  // `warp`: even ones load K, odd ones V.
  CUTE_DEVICE Producer(KernelArgs const& args, typename Traits::SharedStorage& smem, int warp)
      : args_(args), smem_(smem), values_(warp % 2 != 0), leads_(warp < 2), loader_(args, smem, warp) {
    if (values_) {  // tiles of K and V take stages by turns
      state_.advance();
      arriving_.advance();
    }
  }

  CUTE_DEVICE Walk<typename Traits::Cut> find_work() const {
    return {args_.params, int(blockIdx.x) / args_.params.heads_kv, int(blockIdx.x) % args_.params.heads_kv};
  }

  CUTE_DEVICE void run(Walk<typename Traits::Cut>& walk) {
    while (walk.next()) {
      if (leads()) {
        if (values_) {
          prefetch_queries(walk.unit());
        } else {
          publish(walk.unit());
        }
      }
      load_unit(walk.unit());
    }
    if (leads() && !values_) publish({});
  }

 private:
  // Whether it is the first of the warps that load a tile.
  CUTE_DEVICE bool leads() const { return Loader::kWarps == 1 || leads_; }

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
    loader_.look_up(unit, begin);
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      auto const found = loader_.found(unit, tile);
      if constexpr (Traits::kTilesInFlight > 0) wait_for_arrivals();
      smem_.pipeline.wait_empty(state_);
      loader_.load(found, state_);
      state_.advance();
      state_.advance();
      launch_dependents();  // not before: beside it the instructions of this kernel would arrive later
    }
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

  KernelArgs const& args_;
  typename Traits::SharedStorage& smem_;
  bool values_;
  bool leads_;
  Loader loader_;
  PipelineState<Traits::kStages> state_;
  PipelineState<Traits::kStages> arriving_;  // of the tile that was asked for first, of those that may be in flight
  int in_flight_ = 0;
  PipelineState<2> unit_state_;
};

}  // namespace flash_cute::sm90::decode::split_keys
