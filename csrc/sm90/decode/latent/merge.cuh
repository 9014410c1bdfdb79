// The fold of the parts of units whose pieces several CTAs have computed. A row tile's parts are large: several CTAs
// share a place where two ranges meet, and a warp folds whole rows.
#pragma once

#include <cute/tensor.hpp>

#include "core/split_keys/merge.cuh"
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
    bool const found = this->find_unit();
    wait_for_kernel_before();
    if (!found) return;
    int const sharers = (this->last_bundle_ - this->first_bundle_) * kMergeShares;
    int const sharer = (this->bundle_ - this->first_bundle_ - 1) * kMergeShares + share_;
    int const warp = sharer * kMergeWarps + int(threadIdx.x / 32);
#pragma unroll 1
    for (int number = warp; number < this->unit_.rows; number += sharers * kMergeWarps) merge_row(number);
  }

 private:
  // A lane has four columns of each 128.
  static constexpr int kVectors = kHeadDimV / 128;
  static constexpr int kAtOnce = 3;  // pieces; of four the registers spill
  struct Row {
    RowState state;
    float4 acc[kVectors];
  };

  CUTE_DEVICE Row load(Part const& part, int number) const {
    Row row;
    row.state = Base::state_of(part, number);
    auto const* const source = reinterpret_cast<float4 const*>(part.acc + number * kHeadDimV) + this->lane_;
    CUTE_UNROLL
    for (int v = 0; v < kVectors; ++v) row.acc[v] = __ldcg(source + 32 * v);
    return row;
  }

  // `number`: in the row tile.
  CUTE_DEVICE void merge_row(int number) const {
    int const begin = flash_cute::split_keys::pieces_before(this->ranges_.begin(this->first_bundle_ + 1), this->first_,
                                                            this->unit_.pieces);
    int const count = this->unit_.pieces.count;
    Row row = load(Part::of_fold<kHeadDimV>(this->params_, this->unit_, this->first_bundle_), number);
#pragma unroll 1
    for (int first = begin; first < count; first += kAtOnce) {
      Row pieces[kAtOnce];
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        pieces[i] = load(this->part_of(first + i), number);  // behind the last: the last
      }
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < count) add(row, pieces[i]);
      }
    }
    store(number, row);
  }

  // As the CTA of the first kernel does.
  CUTE_DEVICE void add(Row& row, Row const& piece) const {
    auto const factors = row.state.add(piece.state, this->params_.scale_log2);
    CUTE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      float4& sum = row.acc[v];
      float4 const& added = piece.acc[v];
      sum = {factors.add(sum.x, added.x), factors.add(sum.y, added.y), factors.add(sum.z, added.z),
             factors.add(sum.w, added.w)};
    }
  }

  CUTE_DEVICE void store(int number, Row const& result) const {
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
    for (int v = 0; v < kVectors; ++v) {
      int const column = 128 * v + 4 * this->lane_;
      if (column >= this->params_.head_dim_v) continue;
      store_pair(place.out + column, result.acc[v].x, result.acc[v].y, inverse, blind);
      store_pair(place.out + column + 2, result.acc[v].z, result.acc[v].w, inverse, blind);
    }
    if (this->lane_ == 0) *place.lse = blind ? -INFINITY : result.state.lse(this->params_.scale_log2);
  }

  int share_;
};

}  // namespace flash_cute::sm90::decode::latent
