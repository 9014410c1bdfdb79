// What the four warps that compute do with a unit of work.
//
// Few rows (kRowWarps 1): each warp has all 16 rows and a quarter of each key tile, and a softmax of its own, so that
// no tile makes warps wait for one another. At the end of a piece they merge: each sums a quarter of the columns. Many
// rows (kRowWarps 4): each warp has 16 rows and all keys.
#pragma once

#include <cute/tensor.hpp>

#include "fold.cuh"
#include "products_of_cache.cuh"
#include "rows.cuh"
#include "traits.cuh"
#include "work.cuh"

namespace flash_cute::split_keys {

constexpr int kConsumers = 1;  // named barrier of the warps that compute

CUTE_DEVICE void consumers_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kConsumers), "n"(32 * kConsumerWarps) : "memory");
}

// A thread's accumulators: of each 8 columns it has 2 x 2 values, (row 0, column 0), (row 0, column 1), (row 1, column
// 0), (row 1, column 1).
template <int kGroups>
struct Columns {
  float4 values[kGroups];
};

// Beside float8 values a group has every other one of 16 columns. This puts those of two groups in order: the thread's
// are then (column 0, column 1) in the first and (column 2, column 3) in the second.
template <int kGroups>
CUTE_DEVICE Columns<kGroups> in_order(Columns<kGroups> const& columns) {
  static_assert(kGroups % 2 == 0);
  Columns<kGroups> result;
  CUTE_UNROLL
  for (int g = 0; g < kGroups; g += 2) {
    float4 const &even = columns.values[g], &odd = columns.values[g + 1];
    result.values[g] = {even.x, odd.x, even.z, odd.z};
    result.values[g + 1] = {even.y, odd.y, even.w, odd.w};
  }
  return result;
}

CUTE_DEVICE float4 scaled(float4 const& x, float row0, float row1) {
  return {__fmul_rn(x.x, row0), __fmul_rn(x.y, row0), __fmul_rn(x.z, row1), __fmul_rn(x.w, row1)};
}
CUTE_DEVICE float4 sum_of(float4 const& a, float4 const& b) {
  return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)};
}

template <class Traits, int kRowWarps>
class Consumer {
 public:
  using Element = typename Traits::Element;
  using Operand = typename Traits::Operand;
  using Cache = typename Traits::Cache;
  static constexpr int kKeyWarps = kConsumerWarps / kRowWarps;
  static constexpr bool kByWarpgroup = kRowWarps == kConsumerWarps && Traits::kHasWarpgroupProducts;
  static constexpr int kKeys = Traits::kTileKeys / kKeyWarps;  // of a tile, a warp's
  // Whose scores are in registers: more would spill.
  static constexpr int kStepKeys = kByWarpgroup ? kKeys : cute::min(kKeys, Traits::kHeadDimV > 192 ? 16 : 32);
  using Products = ProductsOfCache<Traits, kStepKeys>;
  // The scores of the next tile are computed beside the product of a tile.
  static constexpr bool kScoresAhead = Traits::kScoresAhead && kKeyWarps > 1 && kStepKeys == kKeys;
  static constexpr int kAllGroups = Traits::kHeadDimV / 8;
  static constexpr int kGroups = kAllGroups / kKeyWarps;  // of the columns that a warp folds and stores
  static_assert(kKeys % 16 == 0 && kAllGroups % kKeyWarps == 0);

  using Storage = ConsumerStorage<Traits::kHeadDim, Traits::kHeadDimV, sizeof(Cache)>;

  CUTE_DEVICE Consumer(DecodeParams const& params, Unit const& unit, Storage& smem)
      : params_(params),
        unit_(unit),
        smem_(smem),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        number_((kRowWarps == 1 ? 0 : 16 * warp_) + lane_ / 4),
        first_column_(kKeyWarps == 1 ? 0 : 8 * kGroups * warp_),
        factor_k_(Traits::kFloat8 ? factor_of(params.descale_k, unit.batch, unit.head_kv) : 1.f) {}

  // `ring`: wait_keys(), wait_values() -> the tile in shared memory; release_keys(), release_values(), in this order.
  template <class Ring>
  CUTE_DEVICE void run(Ring& ring) {
    auto tSrQ = fragment_a<Operand>(typename Traits::Mma{}, Shape<_16, Int<Traits::kHeadDim>>{});  // (MMA, 1, D / 16)
    load_queries<Traits>(params_, unit_, number_, tSrQ);
    if constexpr (Traits::kQInShared) {
      char* const q = smem_.q + warp_ * (sizeof(smem_.q) / kConsumerWarps);
      auto words = recast<uint128_t>(tSrQ);  // (1, 1, D / 16)
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tSrQ); ++k) {
        shared_queries(q, k) = reinterpret_cast<uint4 const&>(words(_0{}, _0{}, k));
      }
      run(ring, QueriesInShared{q});  // each lane reads what it wrote
    } else {
      run(ring, QueriesInRegisters<decltype(tSrQ)>{tSrQ});
    }
  }

 private:
  CUTE_DEVICE Row row(int i) const { return Row::of(params_, unit_, number_ + 8 * i); }

  template <class Ring, class Queries>
  CUTE_DEVICE void run(Ring& ring, Queries const& queries) {
    typename Traits::Mma mma;
    RowState state[kRowsOfThread] = {RowState::of_nothing(), RowState::of_nothing()};
    if constexpr (kKeyWarps == 1) consumers_sync();  // of a unit of few rows before, others may still read the shares
    CUTE_UNROLL
    for (int g = 0; g < kGroups; ++g) folded(g) = {0.f, 0.f, 0.f, 0.f};
    auto tSrS = partition_fragment_C(mma, Shape<_16, Int<kStepKeys>>{});  // kScoresAhead; (MMA, 1, keys / 8)
    int const end = unit_.end_of(unit_.piece_end - 1);
    if constexpr (kScoresAhead) {
      if (unit_.begin_of(unit_.piece_begin) < end) {
        Products::qk(params_, ring.wait_keys(), warp_ * kKeys, queries, tSrS);
        ring.release_keys();
      }
    }
#pragma unroll 1
    for (int piece = unit_.piece_begin; piece < unit_.piece_end; ++piece) {
      auto tOrO = partition_fragment_C(mma, Shape<_16, Int<Traits::kHeadDimV>>{});  // (MMA, 1, Dv / 8)
      PieceSoftmax softmax;
      softmax.clear();
      clear(tOrO);
#pragma unroll 1
      for (int tile = unit_.begin_of(piece); tile < unit_.end_of(piece); ++tile) {
        if constexpr (kScoresAhead) {
          compute_tile_and_next_scores(ring, tile, end, queries, softmax, tSrS, tOrO);
        } else {
          compute_tile(ring, tile, queries, softmax, tOrO);
        }
      }
      softmax.finish();
      finish_piece(piece, softmax, tOrO, state);
    }
    if (!unit_.has_first()) return;
    Columns<kGroups> result;
    CUTE_UNROLL
    for (int g = 0; g < kGroups; ++g) result.values[g] = folded(g);
    if (unit_.has_last()) {
      store_result(result, state);
    } else {
      store_part(Part::of_fold<Traits::kHeadDimV>(params_, unit_, unit_.bundle), result, state);
    }
  }

  template <class Ring, class Queries, class Accumulator>
  CUTE_DEVICE void compute_tile(Ring& ring, int tile, Queries const& queries, PieceSoftmax& softmax,
                                Accumulator& tOrO) {
    constexpr int kSteps = kKeys / kStepKeys;
    int const own = kKeyWarps == 1 ? 0 : warp_ * kKeys;  // the warp's first key in the tile
    Cache const* const keys = ring.wait_keys();
    if constexpr (kSteps == 1) {
      step(keys, [&] { ring.release_keys(); return ring.wait_values(); }, tile, own, queries, softmax, tOrO);
    } else {
      Cache const* const values = ring.wait_values();
#pragma unroll 1
      for (int i = 0; i < kSteps; ++i) {
        step(keys, [&] { return values; }, tile, own + i * kStepKeys, queries, softmax, tOrO);
      }
      ring.release_keys();
    }
    ring.release_values();
  }

  // `tSrS`: the scores of the tile; then those of the next one, if it is not behind `end`.
  template <class Ring, class Queries, class Scores, class Accumulator>
  CUTE_DEVICE void compute_tile_and_next_scores(Ring& ring, int tile, int end, Queries const& queries,
                                                PieceSoftmax& softmax, Scores& tSrS, Accumulator& tOrO) {
    int const own = warp_ * kKeys;
    auto const tSrP = numerators(tile * Traits::kTileKeys + own, softmax, tSrS, tOrO);
    auto tOrP = make_tensor(tSrP.data(), operand_a_layout(tSrP.layout()));  // (MMA, 1, keys / 16)
    Cache const* const values = ring.wait_values();
    bool const has_next = tile + 1 < end;
    Cache const* const keys = has_next ? ring.wait_keys() : values;  // of no tile: in vain, without a branch
    KeysThatExist const exist = keys_that_exist(tile, own);
    Products::pv_and_next_qk(params_, values, keys, own, exist, tOrP, tOrO, queries, tSrS);
    ring.release_values();
    if (has_next) ring.release_keys();
  }

  // Of raw scores, from key `first` on; rescales the accumulator.
  template <class Scores, class Accumulator>
  CUTE_DEVICE auto numerators(int first, PieceSoftmax& softmax, Scores& tSrS, Accumulator& tOrO) {
    auto scores = rowcol_view(tSrS);  // (rows, columns)
    if constexpr (Traits::kFloat8) {
      CUTE_UNROLL
      for (int i = 0; i < size(tSrS); ++i) tSrS(i) *= factor_k_;
    }
    modify_and_mask(params_, unit_, number_, first, kStepKeys, scores);
    auto acc = rowcol_view(tOrO);
    softmax.update(scores, acc, params_.scale_log2);
    auto tSrP = make_tensor_like<Operand>(tSrS);
    convert(tSrS, tSrP);
    return tSrP;
  }

  // Of a tile's keys from `own` on, which the step has.
  CUTE_DEVICE KeysThatExist keys_that_exist(int tile, int own) const {
    int const begin = unit_.seen_begin - tile * Traits::kTileKeys, end = unit_.seen_end - tile * Traits::kTileKeys;
    return {.begin = begin, .end = end, .all = begin <= own && end >= own + kStepKeys};
  }

  // Of the keys of a tile from `own` on. `values_of` is called once the scores have been computed.
  template <class ValuesOf, class Queries, class Accumulator>
  CUTE_DEVICE void step(Cache const* keys, ValuesOf const& values_of, int tile, int own, Queries const& queries,
                        PieceSoftmax& softmax, Accumulator& tOrO) {
    typename Traits::Mma mma;
    auto tSrS = partition_fragment_C(mma, Shape<_16, Int<kStepKeys>>{});  // (MMA, 1, keys / 8)
    if constexpr (kByWarpgroup) {
      Traits::WarpgroupProducts::multiply_qk(keys, queries.tSrQ, tSrS);
    } else {
      Products::qk(params_, keys, own, queries, tSrS);
    }
    Cache const* const values = values_of();
    auto tSrP = numerators(tile * Traits::kTileKeys + own, softmax, tSrS, tOrO);
    auto tOrP = make_tensor(tSrP.data(), operand_a_layout(tSrP.layout()));  // (MMA, 1, keys / 16)
    KeysThatExist const exist = keys_that_exist(tile, own);
    if constexpr (kByWarpgroup) {
      if (!exist.all) {
        Traits::WarpgroupProducts::clear_values(values, exist.begin, exist.end);
        consumers_sync();
      }
      Traits::WarpgroupProducts::multiply_pv(values, tOrP, tOrO);
    } else {
      Products::pv(params_, values, own, exist, tOrP, tOrO);
    }
  }

  // Merges the warps' shares of a piece, and folds it or stores it as a part.
  template <class Accumulator>
  CUTE_DEVICE void finish_piece(int piece, PieceSoftmax const& softmax, Accumulator const& tOrO,
                                RowState (&state)[kRowsOfThread]) {
    Columns<kGroups> columns;
    RowState of_piece[kRowsOfThread];
    if constexpr (kKeyWarps == 1) {
      CUTE_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        columns.values[g] = {tOrO(4 * g), tOrO(4 * g + 1), tOrO(4 * g + 2), tOrO(4 * g + 3)};
      }
      CUTE_UNROLL
      for (int i = 0; i < kRowsOfThread; ++i) of_piece[i] = {softmax.max[i], softmax.sum[i]};
    } else {
      merge_warps(softmax, tOrO, columns, of_piece);
    }
    if (!unit_.has_first()) {
      int const i = piece - unit_.piece_begin;
      store_part(Part::of_piece<Traits::kHeadDimV>(params_, unit_, unit_.bundle, i), columns, of_piece);
      return;
    }
    FoldFactors const row0 = state[0].add(of_piece[0], params_.scale_log2);
    FoldFactors const row1 = state[1].add(of_piece[1], params_.scale_log2);
    CUTE_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      float4& sum = folded(g);
      float4 const& added = columns.values[g];
      sum = {row0.add(sum.x, added.x), row0.add(sum.y, added.y), row1.add(sum.z, added.z), row1.add(sum.w, added.w)};
      if (g % 4 == 3) asm volatile("" ::: "memory");  // else all loads come first, and spill
    }
  }

  // In shared memory each warp has 16 rows of all columns, in groups of 8 columns. The columns that it folds are there;
  // in the others, if warps share the rows, are its shares of a piece for those that fold them.
  CUTE_DEVICE float4& shared(int warp, int group) {
    return reinterpret_cast<float4*>(smem_.acc)[(warp * kAllGroups + group) * 32 + lane_];
  }
  CUTE_DEVICE float4& folded(int g) { return shared(warp_, first_column_ / 8 + g); }

  // The sum of the warps' shares, in the order of the warps.
  template <class Accumulator>
  CUTE_DEVICE void merge_warps(PieceSoftmax const& softmax, Accumulator const& tOrO, Columns<kGroups>& columns,
                               RowState (&of_piece)[kRowsOfThread]) {
    if (lane_ % 4 == 0) {
      CUTE_UNROLL
      for (int i = 0; i < kRowsOfThread; ++i) {
        smem_.row_max[warp_][lane_ / 4 + 8 * i] = softmax.max[i];
        smem_.row_sum[warp_][lane_ / 4 + 8 * i] = softmax.sum[i];
      }
    }
    consumers_sync();
    float own_factor[kRowsOfThread];
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      int const number = lane_ / 4 + 8 * i;
      float largest = smem_.row_max[0][number], sum = 0.f;
      CUTE_UNROLL
      for (int w = 1; w < kConsumerWarps; ++w) largest = fmaxf(largest, smem_.row_max[w][number]);
      CUTE_UNROLL
      for (int w = 0; w < kConsumerWarps; ++w) {
        float const factor = exp2_approx(__fmul_rn(__fsub_rn(smem_.row_max[w][number], largest), params_.scale_log2));
        sum = __fmaf_rn(smem_.row_sum[w][number], factor, sum);
      }
      own_factor[i] = exp2_approx(__fmul_rn(__fsub_rn(softmax.max[i], largest), params_.scale_log2));
      of_piece[i] = {largest, sum};
    }
    CUTE_UNROLL
    for (int g = 0; g < kAllGroups; ++g) {
      float4 const value{tOrO(4 * g), tOrO(4 * g + 1), tOrO(4 * g + 2), tOrO(4 * g + 3)};
      float4 const share = scaled(value, own_factor[0], own_factor[1]);
      if (g / kGroups == warp_) {
        columns.values[g % kGroups] = share;
      } else {
        shared(warp_, g) = share;
      }
    }
    consumers_sync();
    CUTE_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      auto const share_of = [&](int w) { return w == warp_ ? columns.values[g] : shared(w, warp_ * kGroups + g); };
      float4 sum = share_of(0);
      CUTE_UNROLL
      for (int w = 1; w < kConsumerWarps; ++w) sum = sum_of(sum, share_of(w));
      columns.values[g] = sum;
    }
  }

  // The first of a thread's two columns of a group that is in order.
  CUTE_DEVICE int column_of(int g) const {
    int const of_group = Traits::kFloat8 ? g / 2 * 16 + 4 * (lane_ % 4) + g % 2 * 2 : 8 * g + 2 * (lane_ % 4);
    return first_column_ + of_group;
  }
  CUTE_DEVICE static Columns<kGroups> ordered(Columns<kGroups> const& columns) {
    if constexpr (Traits::kFloat8) {
      return in_order(columns);
    } else {
      return columns;
    }
  }

  CUTE_DEVICE void store_part(Part const& part, Columns<kGroups> const& unordered,
                              RowState const (&state)[kRowsOfThread]) {
    Columns<kGroups> const columns = ordered(unordered);
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      int const number = number_ + 8 * i;
      if (number >= unit_.rows) continue;
      CUTE_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        float4 const& value = columns.values[g];
        int const column = column_of(g);
        *reinterpret_cast<float2*>(part.acc + number * Traits::kHeadDimV + column) =
            i == 0 ? float2{value.x, value.y} : float2{value.z, value.w};
      }
      if (lane_ % 4 == 0 && first_column_ == 0) {
        part.row_max[number] = state[i].max;
        part.row_sum[number] = state[i].sum;
      }
    }
  }

  CUTE_DEVICE void store_result(Columns<kGroups> const& unordered, RowState const (&state)[kRowsOfThread]) {
    Columns<kGroups> const columns = ordered(unordered);
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      Row const row = this->row(i);
      if (!row.exists) continue;
      auto const place =
          ResultRow<Element>::of(params_, unit_.batch, row.head, unit_.sequence.first_row + row.index);
      bool const blind =
          first_seen(params_, unit_.sequence, row.index) >= seen_limit(params_, unit_.sequence, row.index);
      float const sink_log2 = head_sink_log2<Element>(params_.sinks, row.head);
      float const inverse = __fmul_rn(state[i].inverse(sink_log2, params_.scale_log2),
                                      factor_of(params_.descale_v, unit_.batch, unit_.head_kv));
      CUTE_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        float4 const& value = columns.values[g];
        int const column = column_of(g);
        if (column < params_.head_dim_v) {
          store_pair(place.out + column, i == 0 ? value.x : value.z, i == 0 ? value.y : value.w, inverse, blind);
        }
      }
      if (lane_ % 4 == 0 && first_column_ == 0) *place.lse = blind ? -INFINITY : state[i].lse(params_.scale_log2);
    }
  }

  DecodeParams const& params_;
  Unit const& unit_;
  Storage& smem_;
  int warp_;
  int lane_;
  int number_;        // in the row tile, of the thread's first row
  int first_column_;  // that the warp folds and stores
  float factor_k_;    // of float8 keys
};

}  // namespace flash_cute::split_keys
