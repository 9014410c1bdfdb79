// What a CTA does with a unit of work: the scores of a key tile, their softmax, the product with V; at the end of a
// piece its fold. See contract/decode.h for how the work is cut.
#pragma once

#include <type_traits>

#include <cute/tensor.hpp>

#include "core/split_keys/fold.cuh"
#include "load.cuh"
#include "queries.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "traits.cuh"
#include "values.cuh"

namespace flash_cute::sm80::decode::streamed {

using flash_cute::split_keys::FoldFactors;
using flash_cute::split_keys::Part;
using flash_cute::split_keys::ResultRow;
using flash_cute::split_keys::RowState;
using flash_cute::split_keys::store_pair;

// What threads tell one another of the rows at the end of a piece.
struct RowScratch {
  float max[kManyRows];
  float sum[kManyRows];
  FoldFactors factors[kManyRows];
  void* out[kManyRows];  // null: there is no such row
  float inverse[kManyRows];
  bool blind[kManyRows];
};
static_assert(sizeof(RowScratch) <= sizeof(Storage::scores));

// The fold of a unit's pieces is in registers, of many rows in the workspace, where its part would be.
template <class Traits, int kRows>
class RowTile {
 public:
  using Element = typename Traits::Element;
  static constexpr bool kFew = kRows == kFewRows;
  using Queries = std::conditional_t<kFew, QueriesInRegisters<Traits>, QueriesInShared<Traits, kRows>>;
  using Acc = Accumulators<Traits, kRows>;  // (4, rows / 16, columns / 8)

  // `slabs`: the ring, and behind it the queries.
  CUTE_DEVICE RowTile(DecodeParams const& params, Unit const& unit, Storage& smem, Element* slabs, int stages)
      : params_(params),
        unit_(unit),
        smem_(smem),
        ring_(params, unit, smem, slabs, stages),
        queries_(params, unit, slabs + stages * kSlabElements) {}

  CUTE_DEVICE void run() {
    __syncthreads();  // the places of keys are there
    ring_.start();
    Acc tOrO, folded;
    clear(folded);
    RowState state = RowState::of_nothing();  // of the thread's own row
#pragma unroll 1
    for (int piece = unit_.piece_begin; piece < unit_.piece_end; ++piece) {
      clear(tOrO);
      softmax_.clear(smem_);
#pragma unroll 1
      for (int tile = unit_.begin_of(piece); tile < unit_.end_of(piece); ++tile) compute_tile(tile, tOrO);
      share_rows();
      if (!unit_.has_first()) {
        int const i = piece - unit_.piece_begin;
        store_part(Part::of_piece<Traits::kHeadDimV>(params_, unit_, unit_.bundle, i), tOrO, of_piece());
        continue;
      }
      share_factors(state);
      if constexpr (kFew) {
        fold(tOrO, [&](int i, int j) { return pair(folded, i, j); }, folded);
      } else {
        Part const part = part_of_fold();
        fold(tOrO, [&](int i, int j) { return piece > 0 ? load_pair(part, i, j) : float2{0.f, 0.f}; }, tOrO);
        if (piece + 1 < unit_.piece_end) store_part(part, tOrO, state);
      }
    }
    if (unit_.has_first()) finish(kFew ? folded : tOrO, state);
  }

 private:
  CUTE_DEVICE void compute_tile(int tile, Acc& tOrO) {
    Scores<Traits, kRows> scores;
#pragma unroll 1
    for (int slab = 0; slab < key_slabs(params_.head_dim); ++slab) {
      scores.add(ring_.next(), slab, queries_, params_.head_dim);
    }
    scores.store(smem_.scores);  // behind barriers of the ring: the P of the tile before is no longer read
    __syncthreads();
    softmax_.update(params_, unit_, smem_, tile * kTileKeys);
    auto const* const weights = reinterpret_cast<Element const*>(smem_.scores);
#pragma unroll 1
    for (int key = 0; key < kTileKeys; key += Traits::kValueKeys) {
      Element const* const values = ring_.next();  // a barrier: P and the factors are there
      if (key == 0) rescale(smem_.factors, tOrO);
      add_values<Traits, 0>(weights, values, key, params_.head_dim_v, tOrO);
      if constexpr (Traits::kValueParts == 2) {
        if (params_.head_dim_v > Traits::kValueColumns) {
          add_values<Traits, 1>(weights, ring_.next(), key, params_.head_dim_v, tOrO);
        }
      }
    }
  }

  // The state of a row is that of the thread with its number.
  CUTE_DEVICE RowScratch& scratch() const { return reinterpret_cast<RowScratch&>(smem_.scores); }
  CUTE_DEVICE bool has_row() const { return threadIdx.x < kRows; }
  CUTE_DEVICE RowState of_piece() const {
    return has_row() ? RowState{scratch().max[threadIdx.x], scratch().sum[threadIdx.x]} : RowState{};
  }

  // From the warps' softmax.
  CUTE_DEVICE void share_rows() {
    softmax_.finish();
    __syncthreads();  // P is no longer read
    if (threadIdx.x % 32 == 0) {
      CUTE_UNROLL
      for (int i = 0; i < Softmax<Traits, kRows>::kWarpRows; ++i) {
        int const number = threadIdx.x / 32 + kWarps * i;
        scratch().max[number] = smem_.max[number];
        scratch().sum[number] = softmax_.sum[i];
      }
    }
    __syncthreads();
  }

  // Adds the piece to the state.
  CUTE_DEVICE void share_factors(RowState& state) {
    if (has_row()) scratch().factors[threadIdx.x] = state.add(of_piece(), params_.scale_log2);
    __syncthreads();
  }

  // A thread's rows and pairs of columns.
  static constexpr int kThreadRows = kRows / 8, kPairs = decltype(size<2>(Acc{}))::value;
  CUTE_DEVICE static int row_of(int i) { return 8 * i + threadIdx.x % 32 / 4; }
  CUTE_DEVICE static float2 pair(Acc const& acc, int i, int j) {
    return {acc(i % 2 * 2, i / 2, j), acc(i % 2 * 2 + 1, i / 2, j)};
  }
  CUTE_DEVICE float2 load_pair(Part const& part, int i, int j) const {
    if (row_of(i) >= unit_.rows) return {0.f, 0.f};
    return *reinterpret_cast<float2 const*>(part.acc + row_of(i) * Traits::kHeadDimV + column_of<Traits>(j));
  }

  // `result` = `before` and the piece.
  template <class Before>
  CUTE_DEVICE void fold(Acc const& of_piece, Before const& before, Acc& result) const {
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      FoldFactors const factors = scratch().factors[row_of(i)];
      CUTE_UNROLL
      for (int j = 0; j < kPairs; ++j) {
        float2 const sum = before(i, j), added = pair(of_piece, i, j);
        result(i % 2 * 2, i / 2, j) = add_piece(sum.x, added.x, factors);
        result(i % 2 * 2 + 1, i / 2, j) = add_piece(sum.y, added.y, factors);
      }
    }
  }

  CUTE_DEVICE Part part_of_fold() const { return Part::of_fold<Traits::kHeadDimV>(params_, unit_, unit_.bundle); }

  CUTE_DEVICE void store_part(Part const& part, Acc const& acc, RowState const& state) const {
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      if (row_of(i) >= unit_.rows) continue;
      CUTE_UNROLL
      for (int j = 0; j < kPairs; ++j) {
        float* const target = part.acc + row_of(i) * Traits::kHeadDimV + column_of<Traits>(j);
        *reinterpret_cast<float2*>(target) = pair(acc, i, j);
      }
    }
    if (threadIdx.x < unit_.rows) {
      part.row_max[threadIdx.x] = state.max;
      part.row_sum[threadIdx.x] = state.sum;
    }
  }

  CUTE_DEVICE void finish(Acc const& acc, RowState const& state) const {
    if (unit_.has_last()) {
      store_result(acc, state);
    } else {
      store_part(part_of_fold(), acc, state);
    }
  }

  CUTE_DEVICE void store_result(Acc const& acc, RowState const& state) const {
    if (has_row()) share_result(Row::of(params_, unit_, threadIdx.x), state);
    __syncthreads();
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      auto* const out = static_cast<Element*>(scratch().out[row_of(i)]);
      if (out == nullptr) continue;
      float const inverse = scratch().inverse[row_of(i)];
      bool const blind = scratch().blind[row_of(i)];
      CUTE_UNROLL
      for (int j = 0; j < kPairs; ++j) {
        int const column = column_of<Traits>(j);
        float2 const value = pair(acc, i, j);
        if (column < params_.head_dim_v) store_pair(out + column, value.x, value.y, inverse, blind);
      }
    }
  }

  CUTE_DEVICE void share_result(Row const& row, RowState const& state) const {
    scratch().out[row.number] = nullptr;
    if (!row.exists) return;
    auto const place = ResultRow<Element>::of(params_, unit_.batch, row.head, unit_.sequence.first_row + row.index);
    bool const blind = first_seen(params_, unit_.sequence, row.index) >= seen_limit(params_, unit_.sequence, row.index);
    float const sink_log2 = head_sink_log2<Element>(params_.sinks, row.head);
    scratch().out[row.number] = place.out;
    scratch().inverse[row.number] = state.inverse(sink_log2, params_.scale_log2);
    scratch().blind[row.number] = blind;
    *place.lse = blind ? -INFINITY : state.lse(params_.scale_log2);
  }

  DecodeParams const& params_;
  Unit const& unit_;
  Storage& smem_;
  Ring<Traits> ring_;
  Queries queries_;
  Softmax<Traits, kRows> softmax_;
};

}  // namespace flash_cute::sm80::decode::streamed
