// The kernel behind the first: folds the parts of the units whose pieces several CTAs have computed, and writes the
// rows that are in no sequence.
#pragma once

#include <cute/tensor.hpp>

#include "fold.cuh"
#include "work.cuh"

namespace flash_cute::split_keys {

constexpr int kMergeWarps = 4;

// The CTAs of a sequence and a KV head, whose warps take its packed rows by turns.
constexpr int merge_ctas(DecodeParams const& params) {
  int64_t const warps = int64_t{params.len_q} * params.group / (params.cu_q == nullptr ? 1 : std::max(1, params.batch));
  return int(std::clamp<int64_t>(warps / kMergeWarps, 1, 64));
}

// Of the whole kernel: one more writes the rows of no sequence.
constexpr int64_t all_merge_ctas(DecodeParams const& params) {
  return int64_t{params.batch} * params.heads_kv * merge_ctas(params) + (params.cu_q == nullptr ? 0 : 1);
}

// A warp has a row, a lane four columns of each 128.
template <class Traits>
class Merge {
 public:
  using Element = typename Traits::Element;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kVectors = ceil_div(kHeadDimV, 128);
  static constexpr int kAhead = 12 / kVectors;  // pieces whose loads are in flight at once

  CUTE_DEVICE Merge(DecodeParams const& params, int batch, int head_kv)
      : params_(params), batch_(batch), head_kv_(head_kv), lane_(threadIdx.x % 32) {}

  // `cta`: of those of the sequence and the KV head. `wait`: until the parts have been written.
  template <class Wait>
  CUTE_DEVICE void run(int cta, Wait const& wait) {
    constexpr int kTileKeys = Traits::kTileKeys;
    total_ = find_place<kTileKeys>(params_, INT64_MAX).weight;
    Place const place = find_place<kTileKeys>(params_, INT64_MAX, batch_);
    int rows = params_.len_q, first_row = 0;
    if (params_.cu_q != nullptr) {
      first_row = place.floor;
      rows = row_offset(params_, batch_ + 1, first_row) - first_row;
    }
    sequence_ = make_sequence(params_, batch_, first_row, rows);
    pieces_ = Pieces::of<kTileKeys>(params_, sequence_);
    int const tile = rows_of_tile(rows * params_.group), step = kMergeWarps * merge_ctas(params_);
#pragma unroll 1
    for (int packed = kMergeWarps * cta + int(threadIdx.x / 32); packed < rows * params_.group; packed += step) {
      merge_row(packed, packed % tile, place.weight + int64_t{packed / tile} * pieces_.weight(), wait);
    }
    wait();
  }

 private:
  // `number`: in the row tile, whose first piece is at `first`. Where all its pieces are one CTA's, that has written the
  // result.
  template <class Wait>
  CUTE_DEVICE void merge_row(int packed, int number, int64_t first, Wait const& wait) {
    int const bundle = bundle_of(params_, total_, first);
    int const begin = pieces_before(range_begin(params_, total_, bundle + 1), first, pieces_);
    if (begin == pieces_.count) return;
    Part const fold = Part::of<kHeadDimV>(params_, bundle, slot_of_fold(params_), head_kv_);
    Part own = part_of(begin + lane_, first);
    wait();
    float4 acc[kVectors];
    load(fold.acc + number * kHeadDimV, acc);
    RowState state = state_of(fold, number);
#pragma unroll 1
    for (int from = begin; from < pieces_.count; from += 32) {
      if (from > begin) own = part_of(from + lane_, first);
      RowState const own_state = state_of(own, number);
      fold_pieces(own.acc + number * kHeadDimV, own_state, min(32, pieces_.count - from), state, acc);
    }
    store(packed, state, acc);
  }

  // Adds the pieces of the first `count` lanes.
  CUTE_DEVICE void fold_pieces(float const* own_acc, RowState const& own_state, int count, RowState& state,
                               float4 (&acc)[kVectors]) const {
    constexpr uint32_t kAll = 0xffffffff;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += kAhead) {
      float4 added[kAhead][kVectors];
      CUTE_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        uint64_t const data = __shfl_sync(kAll, reinterpret_cast<uint64_t>(own_acc), begin + i);
        load(reinterpret_cast<float const*>(data), added[i]);
      }
      CUTE_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        RowState const piece{__shfl_sync(kAll, own_state.max, begin + i), __shfl_sync(kAll, own_state.sum, begin + i)};
        if (begin + i >= count) continue;
        FoldFactors const factors = state.add(piece, params_.scale_log2);
        CUTE_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          acc[j] = {add_piece(acc[j].x, added[i][j].x, factors), add_piece(acc[j].y, added[i][j].y, factors),
                    add_piece(acc[j].z, added[i][j].z, factors), add_piece(acc[j].w, added[i][j].w, factors)};
        }
      }
    }
  }

  // Behind the last piece: that of the last.
  CUTE_DEVICE Part part_of(int piece, int64_t first) const {
    piece = min(piece, pieces_.count - 1);
    int const bundle = bundle_of(params_, total_, first + int64_t{piece} * pieces_.tiles);
    int const begin = pieces_before(range_begin(params_, total_, bundle), first, pieces_);
    return Part::of<kHeadDimV>(params_, bundle, slot_of_piece(piece - begin), head_kv_);
  }

  CUTE_DEVICE static RowState state_of(Part const& part, int number) {
    return {__ldcg(part.row_max + number), __ldcg(part.row_sum + number)};
  }

  CUTE_DEVICE void load(float const* data, float4 (&acc)[kVectors]) const {
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      if (column_of(i) < kHeadDimV) acc[i] = __ldcg(reinterpret_cast<float4 const*>(data + column_of(i)));
    }
  }

  CUTE_DEVICE int column_of(int vector) const { return 128 * vector + 4 * lane_; }

  CUTE_DEVICE void store(int packed, RowState const& state, float4 const (&acc)[kVectors]) const {
    int const row = packed / params_.group;
    int const head = head_kv_ * params_.group + packed % params_.group;
    auto const place = ResultRow<Element>::of(params_, batch_, head, sequence_.first_row + row);
    bool const blind = first_seen(params_, sequence_, row) >= seen_limit(params_, sequence_, row);
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
  int64_t total_;  // the weight of all units
  CacheSequence sequence_;
  Pieces pieces_;
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
