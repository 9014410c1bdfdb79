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
  FoldFactors factors[kManyRows];
  void* out[kManyRows];  // null: there is no such row
  float inverse[kManyRows];
  bool blind[kManyRows];
};
static_assert(sizeof(RowScratch) <= sizeof(Storage::scores));

// The fold of a unit's pieces is in registers; that of many rows has no room there, and is in the workspace as its part
// would be.
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
        queries_(params, unit, slabs + stages * kSlabElements),
        thread_(fresh_thread_index()) {}

  CUTE_DEVICE void run() {
    __syncthreads();  // the places of keys are there
    ring_.start();
    Acc tOrO, folded;
    clear(folded);
    RowState state = RowState::of_nothing();  // of the row with the thread's number
#pragma unroll 1
    for (int piece = unit_.piece_begin; piece < unit_.piece_end; ++piece) {
      clear(tOrO);
      Softmax<Traits, kRows>::clear(smem_);
#pragma unroll 1
      for (int tile = unit_.begin_of(piece); tile < unit_.end_of(piece); ++tile) compute_tile(tile, tOrO);
      __syncthreads();  // the softmax has ended, and P is no longer read
      if (!unit_.has_first()) {
        Part const part = Part::of_piece<Traits::kHeadDimV>(params_, unit_, unit_.bundle, piece - unit_.piece_begin);
        store_state(part, of_piece());
        store_rows(part, tOrO);
      } else if constexpr (kFew) {
        share_factors(state);
        fold(tOrO, [&](int, int i, int j) { return pair(folded, i, j); }, folded);
      } else {
        fold_in_memory(piece, tOrO);
      }
    }
    cp_async_wait<0>();  // for the queries, where there was no key tile
    if (!unit_.has_first()) return;
    Part const part = part_of_fold();
    if constexpr (kFew) {
      if (!unit_.has_last()) store_state(part, state);
    } else if (unit_.has_last()) {
      state = load_state(part);
    }
    Acc const& result = kFew ? folded : tOrO;
    if (unit_.has_last()) {
      store_result(result, state);
    } else {
      store_rows(part, result);
    }
  }

 private:
  // The thread's index. Where registers have room it is kept, and with it what loops derive from it.
  CUTE_DEVICE unsigned thread() const {
    return kFew && Traits::kHeadDimV <= 512 ? thread_ : unsigned(fresh_thread_index());
  }

  CUTE_DEVICE void compute_tile(int tile, Acc& tOrO) {
    Scores<Traits, kRows> scores;
    int const slabs_of_keys = key_slabs(params_.head_dim);
#pragma unroll 1
    for (int slab = 0; slab < slabs_of_keys;) {
      int const end = slab + ring_.advance(slabs_of_keys - slab);
#pragma unroll 1
      for (; slab < end; ++slab) scores.add(ring_.slab(), slab, queries_, params_.head_dim, thread());
    }
    scores.store(smem_.scores, thread());  // behind barriers of the ring: the P of the tile before is no longer read
    __syncthreads();
    Softmax<Traits, kRows>::update(params_, unit_, smem_, tile * kTileKeys, thread());
    int const slabs_of_values = value_slabs(params_.head_dim_v, Traits::kHeadDimV);
#pragma unroll 1
    for (int slab = 0; slab < slabs_of_values;) {
      int const end = slab + ring_.advance(slabs_of_values - slab);  // a barrier: P and the factors are there
      if (slab == 0) rescale(smem_.factors, tOrO);
#pragma unroll 1
      for (; slab < end; ++slab) multiply_values(ring_.slab(), slab, tOrO);
    }
  }

  CUTE_DEVICE void multiply_values(Element const* values, int slab, Acc& tOrO) const {
    auto const* const weights = reinterpret_cast<Element const*>(smem_.scores);
    bool const halves = Traits::kValueParts == 2 && params_.head_dim_v > Traits::kValueColumns;
    int const first_key = (halves ? slab / 2 : slab) * Traits::kValueKeys;
    if (!halves || slab % 2 == 0) {
      add_values<Traits, 0>(weights, values, first_key, params_.head_dim_v, thread(), tOrO);
    } else if constexpr (Traits::kValueParts == 2) {
      add_values<Traits, 1>(weights, values, first_key, params_.head_dim_v, thread(), tOrO);
    }
  }

  // The state of a row is that of the thread with its number.
  CUTE_DEVICE RowScratch& scratch() const { return reinterpret_cast<RowScratch&>(smem_.scores); }
  CUTE_DEVICE RowState of_piece() const {
    int const thread = fresh_thread_index();
    return thread < kRows ? RowState{smem_.max[thread], smem_.sum[thread]} : RowState{};
  }

  CUTE_DEVICE RowState load_state(Part const& part) const {
    int const thread = fresh_thread_index();
    return thread < unit_.rows ? RowState{part.row_max[thread], part.row_sum[thread]} : RowState::of_nothing();
  }
  CUTE_DEVICE void store_state(Part const& part, RowState const& state) const {
    int const thread = fresh_thread_index();
    if (thread >= unit_.rows) return;
    part.row_max[thread] = state.max;
    part.row_sum[thread] = state.sum;
  }

  // Adds the piece to the state.
  CUTE_DEVICE void share_factors(RowState& state) const {
    int const thread = fresh_thread_index();
    if (thread < kRows) scratch().factors[thread] = state.add(of_piece(), params_.scale_log2);
    __syncthreads();
  }

  // A thread's rows and pairs of columns.
  static constexpr int kThreadRows = kRows / 8, kPairs = decltype(size<2>(Acc{}))::value;
  CUTE_DEVICE static int row_of(unsigned thread, int i) { return 8 * i + thread % 32 / 4; }
  CUTE_DEVICE static float2 pair(Acc const& acc, int i, int j) {
    return {acc(i % 2 * 2, i / 2, j), acc(i % 2 * 2 + 1, i / 2, j)};
  }
  CUTE_DEVICE float2 load_pair(Part const& part, int thread, int i, int j) const {
    if (row_of(thread, i) >= unit_.rows) return {0.f, 0.f};
    float const* const source = part.acc + row_of(thread, i) * Traits::kHeadDimV + column_of<Traits>(thread, j);
    return *reinterpret_cast<float2 const*>(source);
  }

  // The rows of the last piece of all stay in registers.
  CUTE_DEVICE void fold_in_memory(int piece, Acc& tOrO) const {
    Part const part = part_of_fold();
    RowState state = piece > 0 ? load_state(part) : RowState::of_nothing();
    share_factors(state);
    store_state(part, state);
    auto const before = [&](int thread, int i, int j) {
      return piece > 0 ? load_pair(part, thread, i, j) : float2{0.f, 0.f};
    };
    fold(tOrO, before, tOrO);
    if (piece + 1 < unit_.piece_end) store_rows(part, tOrO);
  }

  // `result` = `before` and the piece.
  template <class Before>
  CUTE_DEVICE void fold(Acc const& of_piece, Before const& before, Acc& result) const {
    int const thread = fresh_thread_index();
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      FoldFactors const factors = scratch().factors[row_of(thread, i)];
      CUTE_UNROLL
      for (int j = 0; j < kPairs; ++j) {
        float2 const sum = before(thread, i, j), added = pair(of_piece, i, j);
        result(i % 2 * 2, i / 2, j) = factors.add(sum.x, added.x);
        result(i % 2 * 2 + 1, i / 2, j) = factors.add(sum.y, added.y);
      }
      asm volatile("" ::: "memory");  // else the loads of all rows come first, and spill
    }
  }

  CUTE_DEVICE Part part_of_fold() const { return Part::of_fold<Traits::kHeadDimV>(params_, unit_, unit_.bundle); }

  CUTE_DEVICE void store_rows(Part const& part, Acc const& acc) const {
    int const thread = fresh_thread_index();
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      if (row_of(thread, i) >= unit_.rows) continue;
      CUTE_UNROLL
      for (int j = 0; j < kPairs; ++j) {
        float* const target = part.acc + row_of(thread, i) * Traits::kHeadDimV + column_of<Traits>(thread, j);
        *reinterpret_cast<float2*>(target) = pair(acc, i, j);
      }
    }
  }

  CUTE_DEVICE void store_result(Acc const& acc, RowState const& state) const {
    int const thread = fresh_thread_index();
    if (thread < kRows) share_result(Row::of(params_, unit_, thread), state);
    __syncthreads();
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      auto* const out = static_cast<Element*>(scratch().out[row_of(thread, i)]);
      if (out == nullptr) continue;
      float const inverse = scratch().inverse[row_of(thread, i)];
      bool const blind = scratch().blind[row_of(thread, i)];
      CUTE_UNROLL
      for (int j = 0; j < kPairs; ++j) {
        int const column = column_of<Traits>(thread, j);
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
  unsigned thread_;
};

}  // namespace flash_cute::sm80::decode::streamed
