// The kernel behind the first: folds the parts of the units whose pieces several CTAs have computed, and writes the
// rows that are in no sequence. A CTA has a sequence and a KV head, or several share them, and one more has the rows of
// no sequence; a warp has a row.
#pragma once

#include <cute/tensor.hpp>

#include "fold.cuh"
#include "work.cuh"

namespace flash_cute::split_keys {

// A lane has four columns of each 128.
template <class Traits>
class Merge {
 public:
  using Element = typename Traits::Element;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kVectors = ceil_div(kHeadDimV, 128);
  static constexpr int kPiecesAtOnce = kVectors <= 4 ? 4 : 2;  // whose loads are on their way together
  static_assert(32 % kPiecesAtOnce == 0);

  // `share` of `shares` CTAs.
  CUTE_DEVICE Merge(DecodeParams const& params, int batch, int head_kv, int share = 0, int shares = 1)
      : params_(params),
        batch_(batch),
        head_kv_(head_kv),
        lane_(threadIdx.x % 32),
        warp_((share * int(blockDim.x) + int(threadIdx.x)) / 32),
        warps_(shares * int(blockDim.x) / 32) {}

  // `wait`: until the parts have been written.
  template <class Wait>
  CUTE_DEVICE void run(Wait const& wait) {
    using Cut = typename Traits::Cut;
    int64_t const total = find_place<Cut>(params_, INT64_MAX).weight;
    Place const place = find_place<Cut>(params_, INT64_MAX, batch_);
    wait();
    int rows = params_.len_q, first_row = 0;
    if (params_.cu_q != nullptr) {
      first_row = place.floor;
      rows = row_offset(params_, batch_ + 1, first_row) - first_row;
    }
    if (rows == 0) return;
    Unit unit{.head_kv = head_kv_, .batch = batch_, .sequence = make_sequence(params_, batch_, first_row, rows)};
    unit.pieces = Pieces::of<Cut>(params_, unit.sequence);
    for (unit.row_tile = 0; unit.row_tile < row_tiles_of<Cut>(params_, unit.sequence); ++unit.row_tile) {
      set_rows<Cut>(params_, unit);
      int64_t const first = place.weight + int64_t{unit.row_tile} * unit.pieces.weight();
      merge_unit(unit, total, first);
    }
  }

 private:
  CUTE_DEVICE void merge_unit(Unit const& unit, int64_t total, int64_t first) {
    Pieces const& pieces = unit.pieces;
    auto const bundle_of_piece = [&](int piece) {
      return bundle_of(params_, total, first + int64_t{piece} * pieces.tiles);
    };
    int const first_bundle = bundle_of_piece(0);
    if (bundle_of_piece(pieces.count - 1) == first_bundle) return;  // its CTA has written the result
#pragma unroll 1
    for (int number = warp_; number < unit.rows; number += warps_) {
      RowState state;
      float4 acc[kVectors];
      load(Part::of_fold<kHeadDimV>(params_, unit, first_bundle), number, state, acc);
      int bundle = first_bundle, begin = 0;
      int own_bundle = 0;  // of the piece with the lane's number: a division for each would take longer than the loads
#pragma unroll 1
      for (int first_piece = 0; first_piece < pieces.count; first_piece += kPiecesAtOnce) {
        if (first_piece % 32 == 0) own_bundle = bundle_of_piece(min(first_piece + lane_, pieces.count - 1));
        bool folds[kPiecesAtOnce];
        RowState added[kPiecesAtOnce];
        float4 added_acc[kPiecesAtOnce][kVectors];
        CUTE_UNROLL
        for (int i = 0; i < kPiecesAtOnce; ++i) {
          int const piece = first_piece + i, of_piece = __shfl_sync(0xffffffff, own_bundle, piece % 32);
          folds[i] = piece < pieces.count && of_piece != first_bundle;
          if (!folds[i]) continue;
          if (of_piece != bundle) {
            bundle = of_piece;
            begin = piece;
          }
          load(Part::of_piece<kHeadDimV>(params_, unit, bundle, piece - begin), number, added[i], added_acc[i]);
        }
        CUTE_UNROLL
        for (int i = 0; i < kPiecesAtOnce; ++i) {
          if (folds[i]) add(added[i], added_acc[i], state, acc);
        }
      }
      store(unit, number, state, acc);
    }
  }

  CUTE_DEVICE void add(RowState const& piece, float4 const (&of_piece)[kVectors], RowState& state,
                       float4 (&acc)[kVectors]) const {
    FoldFactors const factors = state.add(piece, params_.scale_log2);
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      acc[i] = {add_piece(acc[i].x, of_piece[i].x, factors), add_piece(acc[i].y, of_piece[i].y, factors),
                add_piece(acc[i].z, of_piece[i].z, factors), add_piece(acc[i].w, of_piece[i].w, factors)};
    }
  }

  CUTE_DEVICE int column_of(int vector) const { return 128 * vector + 4 * lane_; }

  CUTE_DEVICE void load(Part const& part, int number, RowState& state, float4 (&acc)[kVectors]) const {
    state = {__ldcg(part.row_max + number), __ldcg(part.row_sum + number)};
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      if (column_of(i) < kHeadDimV) {
        acc[i] = __ldcg(reinterpret_cast<float4 const*>(part.acc + number * kHeadDimV + column_of(i)));
      }
    }
  }

  CUTE_DEVICE void store(Unit const& unit, int number, RowState const& state, float4 const (&acc)[kVectors]) const {
    int const packed = unit.first_row + number, row = packed / params_.group;
    int const head = head_kv_ * params_.group + packed % params_.group;
    auto const place = ResultRow<Element>::of(params_, batch_, head, unit.sequence.first_row + row);
    bool const blind = first_seen(params_, unit.sequence, row) >= seen_limit(params_, unit.sequence, row);
    float const inverse = __fmul_rn(state.inverse(head_sink_log2<Element>(params_.sinks, head), params_.scale_log2),
                                    factor_of(params_.descale_v, batch_, head_kv_));
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      int const column = column_of(i);
      if (column < params_.head_dim_v) {
        store_pair(place.out + column, acc[i].x, acc[i].y, inverse, blind);
        store_pair(place.out + column + 2, acc[i].z, acc[i].w, inverse, blind);
      }
    }
    if (lane_ == 0) *place.lse = blind ? -INFINITY : state.lse(params_.scale_log2);
  }

  DecodeParams const& params_;
  int batch_;
  int head_kv_;
  int lane_;
  int warp_;  // of those that share the rows
  int warps_;
};

// Rows of a packed q before the first sequence and behind the last: out 0, LSE -inf.
template <class Element>
CUTE_DEVICE void clear_rows_of_no_sequence(DecodeParams const& params) {
  if (params.cu_q == nullptr) return;
  int const first = row_offset(params, 0, 0);
  int limit = first;
  for (int batch = int(threadIdx.x % 32); batch <= params.batch; batch += 32) limit = row_offset(params, batch, limit);
  CUTE_UNROLL
  for (int i = 1; i < 32; i *= 2) limit = max(limit, __shfl_xor_sync(0xffffffff, limit, i));
  int const missing = first + params.len_q - limit;
  int const columns = params.head_dim_v / 8;  // of 16 bytes
  int64_t const chunks = int64_t{missing} * params.heads_q * columns;
  for (int64_t i = threadIdx.x; i < chunks; i += blockDim.x) {
    int const column = int(i % columns), head = int(i / columns % params.heads_q);
    int const number = int(i / columns / params.heads_q), row = number < first ? number : limit + number - first;
    auto const place = ResultRow<Element>::of(params, 0, head, row);
    *reinterpret_cast<uint4*>(place.out + 8 * column) = uint4{};
    if (column == 0) *place.lse = -INFINITY;
  }
}

}  // namespace flash_cute::split_keys
