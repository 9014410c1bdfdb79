// The fold of the parts of units whose pieces several CTAs have computed. A row tile's parts are large: several CTAs
// share a place where two ranges meet. A warp folds whole rows, or where there are many pieces, and so many warps, 128
// columns of one.
#pragma once

#include <cute/tensor.hpp>

#include "core/split_keys/merge.cuh"
#include "first_unit.cuh"
#include "sm90/common/dependent_launch.cuh"
#include "tile.h"

namespace flash_cute::sm90::decode::latent {

using namespace cute;

constexpr int kMergeWarps = 4;
constexpr int kMergeThreads = 32 * kMergeWarps;
constexpr int kMergeCtasPerSm = 4;
constexpr int kMergeShares = 4;  // CTAs of a place: so many that all run at once

template <class Traits>
class Merge : flash_cute::split_keys::Merge<Traits> {
 public:
  using Base = flash_cute::split_keys::Merge<Traits>;
  using Element = typename Traits::Element;
  using Part = flash_cute::split_keys::Part;
  using RowState = flash_cute::split_keys::RowState;

  // `bundle`: where its range begins. `share`: of the CTAs of that place.
  CUTE_DEVICE Merge(DecodeParams const& params, int bundle, int head_kv, int share)
      : Base(params, bundle, head_kv), share_(share) {}

  CUTE_DEVICE void run() {
    wait_for_kernel_before();
    if (!read_unit()) return;
    int const count = this->unit_.pieces.count;
    begin_ = flash_cute::split_keys::pieces_before(this->ranges_.begin(this->first_bundle_ + 1), this->first_,
                                                   this->unit_.pieces);
    // Of the bundles behind the first one, those in whose range a piece begins: all, or each has one piece.
    int const sharers = min(this->last_bundle_ - this->first_bundle_, count - begin_) * kMergeShares;
    int const sharer =
        min(this->bundle_ - this->first_bundle_ - 1, this->unit_.piece_begin - begin_) * kMergeShares + share_;
    int const warp = sharer * kMergeWarps + int(threadIdx.x / 32), warps = sharers * kMergeWarps;
    int const own_column = 4 * this->lane_, rows = this->unit_.rows;
    if (warps < rows * kVectors) {
#pragma unroll 1
      for (int number = warp; number < rows; number += warps) merge_row<kVectors, 3>(number, own_column);
    } else if (warp < rows * kVectors) {
      merge_row<1, 6>(warp / kVectors, warp % kVectors * 128 + own_column);
    }
  }

 private:
  // The unit with which the bundle begins, if another one has its first pieces.
  CUTE_DEVICE bool read_unit() {
    FirstUnit found;
    auto const* const source = reinterpret_cast<uint4 const*>(first_unit_of(this->params_, this->bundle_));
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(FirstUnit) / 16); ++i) reinterpret_cast<uint4*>(&found)[i] = __ldcg(source + i);
    if (found.unit.rows == 0 || found.unit.piece_begin == 0) return false;
    this->unit_ = found.unit;
    this->unit_.head_kv = this->head_kv_;
    this->first_ = found.first;
    this->ranges_ = {.total = found.total, .size = found.range, .larger = 0};
    this->set_bundles();
    return true;
  }

  // Of each 128 columns a lane has four.
  static constexpr int kVectors = kHeadDimV / 128;
  template <int kCount>
  struct Row {
    RowState state;
    float4 acc[kCount];
  };

  template <int kCount>
  CUTE_DEVICE Row<kCount> load(Part const& part, int number, int column) const {
    Row<kCount> row;
    row.state = Base::state_of(part, number);
    float const* const source = part.acc + number * kHeadDimV + column;
    CUTE_UNROLL
    for (int v = 0; v < kCount; ++v) row.acc[v] = __ldcg(reinterpret_cast<float4 const*>(source + 128 * v));
    return row;
  }

  // `number`: in the row tile; `column`: of the lane's first. The parts of kAtOnce pieces are loaded at once.
  template <int kCount, int kAtOnce>
  CUTE_DEVICE void merge_row(int number, int column) const {
    int const count = this->unit_.pieces.count;
    auto const fold = Part::of_fold<kHeadDimV>(this->params_, this->unit_, this->first_bundle_);
    auto row = load<kCount>(fold, number, column);
#pragma unroll 1
    for (int from = begin_; from < count; from += 32) {
      Part const own = this->part_of(from + this->lane_);  // behind the last: the last
      int const end = min(32, count - from);
#pragma unroll 1
      for (int first = 0; first < end; first += kAtOnce) {
        Row<kCount> pieces[kAtOnce];
        CUTE_UNROLL
        for (int i = 0; i < kAtOnce; ++i) pieces[i] = load<kCount>(of_lane(own, min(31, first + i)), number, column);
        CUTE_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i < end) add(row, pieces[i]);
        }
      }
    }
    store(number, column, row);
  }

  CUTE_DEVICE Part of_lane(Part const& own, int lane) const {
    auto const acc = __shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(own.acc), lane);
    auto const row_max = __shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(own.row_max), lane);
    auto const row_sum = __shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(own.row_sum), lane);
    return {reinterpret_cast<float*>(acc), reinterpret_cast<float*>(row_max), reinterpret_cast<float*>(row_sum)};
  }

  // As the CTA of the first kernel does.
  template <int kCount>
  CUTE_DEVICE void add(Row<kCount>& row, Row<kCount> const& piece) const {
    auto const factors = row.state.add(piece.state, this->params_.scale_log2);
    CUTE_UNROLL
    for (int v = 0; v < kCount; ++v) {
      float4& sum = row.acc[v];
      float4 const& added = piece.acc[v];
      sum = {factors.add(sum.x, added.x), factors.add(sum.y, added.y), factors.add(sum.z, added.z),
             factors.add(sum.w, added.w)};
    }
  }

  template <int kCount>
  CUTE_DEVICE void store(int number, int first_column, Row<kCount> const& result) const {
    using namespace flash_cute::split_keys;
    auto const row = flash_cute::split_keys::Row::of(this->params_, this->unit_, number);
    auto const& sequence = this->unit_.sequence;
    auto const place =
        ResultRow<Element>::of(this->params_, this->unit_.batch, row.head, sequence.first_row + row.index);
    bool const blind =
        first_seen(this->params_, sequence, row.index) >= seen_limit(this->params_, sequence, row.index);
    float const sink_log2 = head_sink_log2<Element>(this->params_.sinks, row.head);
    float const inverse = result.state.inverse(sink_log2, this->params_.scale_log2);
    CUTE_UNROLL
    for (int v = 0; v < kCount; ++v) {
      int const column = first_column + 128 * v;
      if (column >= this->params_.head_dim_v) continue;
      store_pair(place.out + column, result.acc[v].x, result.acc[v].y, inverse, blind);
      store_pair(place.out + column + 2, result.acc[v].z, result.acc[v].w, inverse, blind);
    }
    if (first_column == 0) *place.lse = blind ? -INFINITY : result.state.lse(this->params_.scale_log2);
  }

  int share_;
  int begin_;  // of the pieces: the first one that the first bundle does not have
};

}  // namespace flash_cute::sm90::decode::latent
