// The kernel behind the first: folds the parts of the units whose pieces several CTAs have computed, and writes the
// rows that are in no sequence.
#pragma once

#include <cute/tensor.hpp>

#include "fold.cuh"
#include "work.cuh"

namespace flash_cute::split_keys {

constexpr int kMergeWarps = 4;
constexpr int kMergeColumns = 64;  // of a row, a warp's

// CTAs: one for each KV head and each place where a range ends and the next one begins, since a unit of which several
// CTAs have pieces lies round such a place. One more writes the rows of no sequence.
constexpr int64_t merge_ctas(DecodeParams const& params) {
  return int64_t{std::max(0, params.bundles - 1)} * params.heads_kv + (params.cu_q == nullptr ? 0 : 1);
}

// The CTAs round whose places the same unit lies share its rows and columns. A warp has 64 columns of a row, a lane two
// of them. The parts of 32 pieces are loaded at once.
template <class Traits>
class Merge {
 public:
  using Element = typename Traits::Element;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kGroups = kHeadDimV / kMergeColumns;
  static_assert(kHeadDimV % kMergeColumns == 0);

  // `bundle`: where its range begins.
  CUTE_DEVICE Merge(DecodeParams const& params, int bundle, int head_kv)
      : params_(params), bundle_(bundle), head_kv_(head_kv), lane_(threadIdx.x % 32) {}

  // `wait`: until the parts have been written.
  template <class Wait>
  CUTE_DEVICE void run(Wait const& wait) {
    bool waited = false;
    if (find_unit()) {
      int const sharers = last_bundle_ - first_bundle_;
      int const warp = (bundle_ - first_bundle_ - 1) * kMergeWarps + int(threadIdx.x / 32);
#pragma unroll 1
      for (int i = warp; i < unit_.rows * kGroups; i += sharers * kMergeWarps) {
        column_ = i % kGroups * kMergeColumns + 2 * lane_;
        merge_row(i / kGroups, waited, wait);
      }
    }
    if (!waited) wait();
  }

 protected:
  // The unit round the place, if several CTAs have pieces of it before the place and behind.
  CUTE_DEVICE bool find_unit() {
    using Cut = typename Traits::Cut;
    Place const place = find_place<Cut>(params_, bundle_, ranges_);
    if (place.batch == params_.batch) return false;
    int rows = params_.len_q, first_row = 0;
    if (params_.cu_q != nullptr) {
      first_row = place.floor;
      rows = row_offset(params_, place.batch + 1, first_row) - first_row;
    }
    unit_.head_kv = head_kv_;
    unit_.batch = place.batch;
    unit_.sequence = make_sequence(params_, place.batch, first_row, rows);
    unit_.pieces = Pieces::of<Cut>(params_, unit_.sequence);
    unit_.row_tile = divide(ranges_.begin(bundle_) - place.weight, unit_.pieces.weight());
    set_rows<Cut>(params_, unit_);
    first_ = place.weight + unit_.row_tile * unit_.pieces.weight();
    set_bundles();
    return bundle_ > first_bundle_ && bundle_ <= last_bundle_;
  }

  CUTE_DEVICE void set_bundles() {
    first_bundle_ = ranges_.bundle_of(first_);
    last_bundle_ = ranges_.bundle_of(first_ + (unit_.pieces.count - 1) * unit_.pieces.tiles);
  }

  // `number`: in the row tile. Before the wait all is done once in vain: the instructions are at hand then.
  template <class Wait>
  CUTE_DEVICE void merge_row(int number, bool& waited, Wait const& wait) {
    int const begin = pieces_before(ranges_.begin(first_bundle_ + 1), first_, unit_.pieces);
    Part const fold = Part::of_fold<kHeadDimV>(params_, unit_, first_bundle_);
    Part const first_own = part_of(begin + lane_);
#pragma unroll 1
    while (true) {
      float2 acc = load(fold, number);
      RowState state = state_of(fold, number);
      Part own = first_own;
#pragma unroll 1
      for (int from = begin; from < unit_.pieces.count; from += 32) {
        if (from > begin) own = part_of(from + lane_);
        fold_pieces(own, number, min(32, unit_.pieces.count - from), state, acc);
      }
      if (waited) {
        store(unit_.first_row + number, state, acc);
        return;
      }
      wait();
      waited = true;
    }
  }

  // Adds the pieces of the first `count` lanes: as RowState::add does, one after the other.
  CUTE_DEVICE void fold_pieces(Part const& own, int number, int count, RowState& state, float2& acc) const {
    constexpr uint32_t kAll = 0xffffffff;
    constexpr int kAtOnce = 8;
    float2 added[32];
    CUTE_UNROLL
    for (int begin = 0; begin < 32; begin += kAtOnce) {
      if (begin >= count) break;
      CUTE_UNROLL
      for (int i = begin; i < begin + kAtOnce; ++i) {
        added[i] = load({.acc = reinterpret_cast<float*>(__shfl_sync(kAll, reinterpret_cast<uint64_t>(own.acc), i))},
                        number);
      }
    }
    RowState const piece = lane_ < count ? state_of(own, number) : RowState::of_nothing();
    float larger = lane_ == 0 ? fmaxf(state.max, piece.max) : piece.max;  // with the lanes before
    CUTE_UNROLL
    for (int i = 1; i < 32; i *= 2) {
      float const other = __shfl_up_sync(kAll, larger, i);
      if (lane_ >= i) larger = fmaxf(larger, other);
    }
    float const previous = __shfl_up_sync(kAll, larger, 1);
    FoldFactors const own_factors =
        FoldFactors::of(lane_ == 0 ? state.max : previous, piece.max, larger, params_.scale_log2);
    float const own_sum = __fmul_rn(piece.sum, own_factors.piece);
    CUTE_UNROLL
    for (int begin = 0; begin < 32; begin += kAtOnce) {
      if (begin >= count) break;
      CUTE_UNROLL
      for (int i = begin; i < begin + kAtOnce; ++i) {
        FoldFactors const factors{__shfl_sync(kAll, own_factors.before, i), __shfl_sync(kAll, own_factors.piece, i)};
        float const sum = __shfl_sync(kAll, own_sum, i);
        if (i >= count) continue;
        state.sum = factors.add_scaled(state.sum, sum);
        acc = {factors.add(acc.x, added[i].x), factors.add(acc.y, added[i].y)};
      }
    }
    state.max = __shfl_sync(kAll, larger, count - 1);
  }

  // Behind the last piece: that of the last.
  CUTE_DEVICE Part part_of(int piece) const {
    piece = min(piece, unit_.pieces.count - 1);
    int const bundle = ranges_.bundle_of(first_ + piece * unit_.pieces.tiles);
    int const begin = pieces_before(ranges_.begin(bundle), first_, unit_.pieces);
    return Part::of_piece<kHeadDimV>(params_, unit_, bundle, piece - begin);
  }

  CUTE_DEVICE static RowState state_of(Part const& part, int number) {
    return {__ldcg(part.row_max + number), __ldcg(part.row_sum + number)};
  }

  CUTE_DEVICE float2 load(Part const& part, int number) const {
    return __ldcg(reinterpret_cast<float2 const*>(part.acc + number * kHeadDimV + column_));
  }

  CUTE_DEVICE void store(int packed, RowState const& state, float2 const& acc) const {
    int const row = packed / params_.group;
    int const head = head_kv_ * params_.group + packed % params_.group;
    auto const place = ResultRow<Element>::of(params_, unit_.batch, head, unit_.sequence.first_row + row);
    bool const blind = first_seen(params_, unit_.sequence, row) >= seen_limit(params_, unit_.sequence, row);
    float const inverse = __fmul_rn(state.inverse(head_sink_log2<Element>(params_.sinks, head), params_.scale_log2),
                                    factor_of(params_.descale_v, unit_.batch, head_kv_));
    if (column_ < params_.head_dim_v) store_pair(place.out + column_, acc.x, acc.y, inverse, blind);
    if (column_ == 0) *place.lse = blind ? -INFINITY : state.lse(params_.scale_log2);
  }

  DecodeParams const& params_;
  int bundle_;
  int head_kv_;
  int lane_;
  int column_;
  Ranges ranges_;
  Unit unit_;
  // The place of the unit's first tile, and the bundles that have pieces of it.
  int first_;
  int first_bundle_;
  int last_bundle_;
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
