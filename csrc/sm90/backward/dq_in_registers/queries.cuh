// dQ for head dims above 128. A CTA owns 128 query rows, 64 per warpgroup, and loops over the key tiles that they see:
// it recomputes S = Q K^T and dP = dO V^T, and accumulates dQ += dS K in registers. The backward thus has 7 GEMMs
// instead of the 5 of one that accumulates dQ in global memory; but that would move 4 bytes per 40 operations here,
// which takes longer (see docs). Without adds in global memory the order of summation is fixed.
// (Past 400 lines: three kinds of tiles, dense, packed and masked, differ in what surrounds one step.)
//
// A warpgroup's step n; the two are half a step apart. One thread of a third warpgroup issues all loads.
//
//     tensor cores |             | dQ += dS(n) K(n), S(n-1), dP(n-1)
//     warpgroup    | P(n), dS(n) | waits
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "core/mask.cuh"
#include "core/mask_columns.cuh"
#include "core/registers.cuh"
#include "core/softmax.cuh"
#include "core/tile_bits.cuh"
#include "sm90/backward/common/modified_scores.cuh"
#include "sm90/backward/common/place.cuh"
#include "sm90/backward/common/scores.cuh"
#include "sm90/backward/common/tile_columns.cuh"
#include "epilogue.cuh"
#include "traits.cuh"
#include "sm90/common/load_tma.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::backward::dq_in_registers {

using backward::RowStats;
using backward::StatOrder;

// The query rows that a CTA owns. The last ones come first: with a causal mask they are the longest.
struct QueryTile {
  static constexpr int kRows = kQueryTileRows;
  int m_block;
  int head;
  int batch;

  CUTE_DEVICE explicit QueryTile(KernelArgs const& args) {
    int const block = fresh_block_index();  // so that nothing of the tile stays in registers across the main loop
    int const tiles = ceil_div(args.params.len_q, int{kRows});
    m_block = tiles - 1 - block % tiles;
    head = block / tiles % args.params.heads_q;
    batch = block / tiles / args.params.heads_q;
  }
};

// The same where sequences are read at run time, in shared memory.
CUTE_DEVICE void find_query_tile(BwdParams const& params, SequenceQueryTile& tile) {
  int const head = blockIdx.x / params.m_blocks;
  ListedRowTile const listed =
      listed_row_tile(params, (2 * head + 1) * params.m_blocks - 1 - static_cast<int>(blockIdx.x));
  tile.m_block = -1;
  if (!listed.exists) return;
  tile.m_block = listed.m_block;
  tile.head = listed.head;
  tile.batch = listed.index;
  tile.first_row_tile = params.tiles.records[listed.index].first_row_tile;
  tile.sequence = params.tiles.records[listed.index].sequence;
}

// The last key tile below number `end` that a row of the tile sees; -1: there is none.
CUTE_DEVICE int last_key_tile_below(MaskedQueryTile const& tile, int end) {
  auto const read = [&](int word) { return tile.visited[word] | tile.visited[word + tile.to_second]; };
  return backward::last_bit_below(read, 0, end);
}

// The same where the batch has a mask.
CUTE_DEVICE void find_query_tile(KernelArgs const& args, MaskedQueryTile& tile) {
  BwdParams const& params = args.params;
  TileMask const& mask = params.mask;
  QueryTile const place(args);
  int const head_kv = place.head / params.heads_per_kv, unit = 2 * place.m_block, words = mask.of_rows.words;
  int64_t const list = place.batch * mask.row_list_batch_stride + head_kv * mask.row_list_head_stride +
                       int64_t{unit} * words;
  uint32_t const* const visited = mask.of_rows.visited + list;
  int const to_second = unit + 1 < mask.of_rows.lists ? words : 0;
  RowBits const* const columns = columns_of_head(mask, place.batch, head_kv);
  tile.m_block = place.m_block;
  tile.head = place.head;
  tile.batch = place.batch;
  tile.visited = visited;
  tile.whole = mask.of_rows.whole + list;
  tile.to_second = to_second;
  tile.columns = columns + (mask.bits != nullptr ? unit * mask.bits_block_stride : 0);
  tile.to_second_columns = mask.bits != nullptr            ? (to_second != 0 ? mask.bits_block_stride : 0)
                           : mask.intervals_per_column > 1 ? mask.interval_stride
                                                           : 0;
  int steps = 0;
#pragma unroll 1
  for (int word = 0; word < words; ++word) steps += __popc(visited[word] | visited[word + to_second]);
  tile.steps = steps;
  tile.last = last_key_tile_below(tile, 32 * words);
}

// What the roles know of their tile: a QueryTile, or the one in shared memory; its lengths and mask; its key tiles.
template <class Traits>
CUTE_DEVICE decltype(auto) query_tile(KernelArgs const& args, typename Traits::QueriesStorage const& smem) {
  if constexpr (Traits::kVariant.reads_sequences || Traits::kVariant.reads_mask) {
    return (smem.tile);
  } else {
    return QueryTile(args);
  }
}
CUTE_DEVICE int block_of(QueryTile const& tile) { return tile.m_block; }
CUTE_DEVICE int block_of(SequenceQueryTile const& tile) { return uniform(tile.m_block); }
CUTE_DEVICE int block_of(MaskedQueryTile const& tile) { return uniform(tile.m_block); }
CUTE_DEVICE BwdParams const& lengths_of(BwdParams const& params, QueryTile const&) { return params; }
CUTE_DEVICE Sequence lengths_of(BwdParams const&, SequenceQueryTile const& tile) {
  return backward::read_band(tile.sequence);
}
CUTE_DEVICE int shift_of(BwdParams const& params, QueryTile const&) {
  return params.sequences.shift;
}
CUTE_DEVICE int shift_of(BwdParams const& params, MaskedQueryTile const&) { return params.sequences.shift; }
CUTE_DEVICE int shift_of(BwdParams const&, SequenceQueryTile const& tile) { return tile.sequence.shift; }
CUTE_DEVICE TileRange key_range_of(BwdParams const& params, QueryTile const& tile) {
  return key_range<QueryTile::kRows, 64>(params, tile.m_block);
}
CUTE_DEVICE TileRange key_range_of(BwdParams const&, SequenceQueryTile const& tile) {
  int const m_block = block_of(tile);
  TileRange range = key_range<QueryTile::kRows, 64>(backward::read_uniform(tile.sequence), m_block);
  if (m_block * QueryTile::kRows >= uniform(tile.sequence.len_q)) range.end = range.begin;  // rows that are not used
  return range;
}
// With a mask: as many, whose numbers the producer tells.
CUTE_DEVICE TileRange key_range_of(BwdParams const&, MaskedQueryTile const& tile) { return {.end = tile.steps}; }

// Calls step(n, first) for each key tile, from the last one on.
template <class Tile, class Step>
CUTE_DEVICE void for_each_key_tile(TileRange const& range, Tile const& tile, Step&& step) {
  if constexpr (std::is_same_v<Tile, MaskedQueryTile>) {
#pragma unroll 1
    for (int n = tile.last; n >= 0; n = last_key_tile_below(tile, n)) step(n, n == tile.last);
  } else {
#pragma unroll 1
    for (int n = range.end - 1; n >= range.begin; --n) step(n, n == range.end - 1);
  }
}

// Where TMA finds row 0 and key 0, for loads and for stores of dQ: the batch, or the coordinates of the sequence.
CUTE_DEVICE int origin_of_rows(BwdParams const&, QueryTile const& tile) { return tile.batch; }
CUTE_DEVICE int origin_of_keys(BwdParams const&, QueryTile const& tile) { return tile.batch; }
CUTE_DEVICE int origin_of_dq(BwdParams const&, QueryTile const& tile) { return tile.batch; }
CUTE_DEVICE int origin_of_rows(BwdParams const&, MaskedQueryTile const& tile) { return tile.batch; }
CUTE_DEVICE int origin_of_keys(BwdParams const&, MaskedQueryTile const& tile) { return tile.batch; }
CUTE_DEVICE int origin_of_dq(BwdParams const&, MaskedQueryTile const& tile) { return tile.batch; }
CUTE_DEVICE SequenceOrigin origin_of_rows(BwdParams const& params, SequenceQueryTile const& tile) {
  return sequence_origin(params, tile, tile.sequence.first_row, tile.sequence.len_q);
}
CUTE_DEVICE SequenceOrigin origin_of_keys(BwdParams const& params, SequenceQueryTile const& tile) {
  return sequence_origin(params, tile, tile.sequence.first_key, tile.sequence.len_k);
}
CUTE_DEVICE SequenceOrigin origin_of_dq(BwdParams const& params, SequenceQueryTile const& tile) {
  return sequence_origin(params, tile, tile.sequence.first_row, tile.sequence.rows);
}

template <class Traits>
CUTE_DEVICE void dq_producer(KernelArgs const& args, typename Traits::QueriesStorage& smem) {
  using ColumnsQ = typename Traits::ColumnsQ;
  using ColumnsK = typename Traits::ColumnsK;
  using ColumnsV = typename Traits::ColumnsV;
  constexpr uint32_t kBytes = Traits::kTileElements * sizeof(typename Traits::Element);
  constexpr uint32_t kBytesV = Traits::kTileElementsV * sizeof(typename Traits::Element);
  auto const& tile = query_tile<Traits>(args, smem);
  TileRange const range = key_range_of(args.params, tile);
  int const head_kv = tile.head / args.params.heads_per_kv;
  if (range.begin == range.end) return;
  auto load_rows = [&](int warpgroup) {
    uint64_t* const full = smem.rows_pipeline[warpgroup].expect({}, kBytes + kBytesV);
    int const row = tile.m_block * QueryTile::kRows + warpgroup * 64;
    auto const origin = origin_of_rows(args.params, tile);
    load_tile<ColumnsQ>(args.q, full, TMA::CacheHintSm90::EVICT_FIRST, smem.q[warpgroup], 64, row, tile.head, origin);
    load_tile<ColumnsV>(args.dout, full, TMA::CacheHintSm90::EVICT_FIRST, smem.dout[warpgroup], 64, row,
                        tile.head, origin);
  };
  load_rows(0);
  PipelineState<2> k_state;
  PipelineState<1> v_state;
  for_each_key_tile(range, tile, [&](int n, bool first) {
    smem.k_pipeline.wait_empty(k_state);  // all consumer warps have finished dQ += dS K of two steps ago
    if constexpr (Traits::kVariant.reads_mask) {
      KeyVisit& visit = smem.visits[k_state.stage];
      visit.n_block = n;
      visit.masked[0] = !is_set(tile.whole, n);
      visit.masked[1] = !is_set(tile.whole + tile.to_second, n);
    }
    load_tile<ColumnsK>(args.k, smem.k_pipeline.expect(k_state, kBytes), TMA::CacheHintSm90::EVICT_LAST,
                        smem.k[k_state.stage], 64, n * 64, head_kv, origin_of_keys(args.params, tile));
    k_state.advance();
    smem.v_pipeline.wait_empty(v_state);  // all consumer warps have finished dP = dO V^T of the step before
    load_tile<ColumnsV>(args.v, smem.v_pipeline.expect(v_state, kBytesV), TMA::CacheHintSm90::EVICT_LAST, smem.v, 64,
                        n * 64, head_kv, origin_of_keys(args.params, tile));
    v_state.advance();
    if (first) load_rows(1);
  });
}

// Of the statistics, which are in tiles of 64 rows: how many tiles are before those of this head and batch, or
// sequence; and whether there is one of number `row_tile`.
template <class Tile>
CUTE_DEVICE int64_t row_tiles_before(BwdParams const& params, Tile const& tile) {
  return int64_t{tile.batch * params.heads_q + tile.head} * params.m_blocks;
}
CUTE_DEVICE int64_t row_tiles_before(BwdParams const& params, SequenceQueryTile const& tile) {
  return 2 * (int64_t{tile.head} * params.m_blocks + tile.first_row_tile);
}
template <class Tile>
CUTE_DEVICE bool has_row_tile(BwdParams const& params, Tile const&, int row_tile) {
  return row_tile < params.m_blocks;
}
CUTE_DEVICE bool has_row_tile(BwdParams const&, SequenceQueryTile const&, int) { return true; }

// Loads the statistics of this thread's two rows among the warpgroup's 64.
template <class Tile>
CUTE_DEVICE void load_row_stats(BwdParams const& params, Tile const& tile, int warpgroup, float (&lse_log2)[2],
                                float (&delta)[2]) {
  int const row_tile = tile.m_block * 2 + warpgroup;
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    int const row = first_row_of_thread(threadIdx.x) + 8 * i;
    int64_t const index = (row_tiles_before(params, tile) + row_tile) * 64 + StatOrder::position(row);
    bool const inside = has_row_tile(params, tile, row_tile);
    lse_log2[i] = inside ? params.lse_log2[index] : INFINITY;
    delta[i] = inside ? params.delta[index] : 0.f;
  }
}

// dP to dS = exp(scale S - lse) (dP - delta). Both (rows, keys).
template <class Scores, class Dscores>
CUTE_DEVICE void compute_ds(Scores const& scores, Dscores& dscores, float scale_log2, float const (&lse_log2)[2],
                            float const (&delta)[2]) {
  CUTE_STATIC_ASSERT_V(size<0>(scores) == _2{});
  CUTE_STATIC_ASSERT_V(shape(scores) == shape(dscores));
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); ++j) {
      float const p = exp2_approx(scores(row, j) * scale_log2 - lse_log2[row]);
      dscores(row, j) = p * (dscores(row, j) - delta[row]);
    }
  }
}

// The same of modified scores, capped if they are; dS is the gradient by the raw ones.
template <backward::Terms kTerms, class Scores, class Coords, class Coords0, class Dscores>
CUTE_DEVICE void compute_modified_ds(Scores const& scores, Dscores& dscores,  // (rows, keys)
                                     Coords const& tScS,                      // (rows, keys) -> (row, key)
                                     Coords0 const& tScS_0,                   // the same for thread 0, static
                                     ScoreTerms const& terms, float scale_log2, backward::TileBias const& bias,
                                     float const (&lse_log2)[2], float const (&delta)[2]) {
  CUTE_STATIC_ASSERT_V(size<0>(scores) == _2{});
  CUTE_STATIC_ASSERT_V(shape(scores) == shape(dscores));
  [[maybe_unused]] float const distance = static_cast<float>(bias.offset + thread_distance(tScS));
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); ++j) {
      float offset = -lse_log2[i];
      if constexpr (backward::has_bias(kTerms)) {
        // One addition for all scores of the thread that have the same distance.
        int const row_from_key = get<0>(tScS_0(i, _0{})) - get<1>(tScS_0(_0{}, j));
        offset = fmaf(-bias.slope_log2, fabsf(distance + static_cast<float>(row_from_key)), offset);
      }
      float const p = backward::modified_p<kTerms>(scores(i, j), terms, scale_log2, offset).times_derivative;
      dscores(i, j) = p * (dscores(i, j) - delta[i]);
    }
  }
}

template <class Traits>
CUTE_DEVICE void dq_consumer(KernelArgs const& args, typename Traits::QueriesStorage& smem, int warpgroup) {
  using Element = typename Traits::Element;
  BwdParams const& params = args.params;
  auto const& tile = query_tile<Traits>(args, smem);
  TileRange range = key_range_of(params, tile);
  if constexpr (Traits::kVariant.reads_mask) range.end = uniform(range.end);
  int const first_row = block_of(tile) * QueryTile::kRows + warpgroup * 64;
  typename Traits::MmaScores mma_scores;
  typename Traits::template MmaSums<Traits::kHeadDim> mma_sums;
  Operands const operands(smem);
  using SmemLayout = typename Traits::template SmemLayout<Traits::kHeadDim>;
  using SmemLayoutV = typename Traits::template SmemLayout<Traits::kHeadDimV>;
  using SmemLayoutT = typename Traits::template SmemLayoutT<Traits::kHeadDim>;
  auto sQ = make_tensor(make_smem_ptr(smem.q[0]), SmemLayout{});                         // (64, D)
  auto sdO = make_tensor(make_smem_ptr(smem.dout[0]), SmemLayoutV{});                    // (64, D)
  auto sK = make_tensor(make_smem_ptr(smem.k[0]), SmemLayout{});                         // (BLK_N, D)
  auto sKt = make_tensor(make_smem_ptr(smem.k[0]), SmemLayoutT{});                       // (D, BLK_N)
  auto sV = make_tensor(make_smem_ptr(smem.v), SmemLayoutV{});                           // (BLK_N, D)
  auto tSrQ = mma_scores.get_slice(0).partition_fragment_A(sQ);                          // (MMA, MMA_M, MMA_D)
  auto tSrdO = mma_scores.get_slice(0).partition_fragment_A(sdO);                        // (MMA, MMA_M, MMA_D)
  auto tSrK = mma_scores.get_slice(0).partition_fragment_B(sK);                          // (MMA, MMA_N, MMA_D)
  auto tSrV = mma_scores.get_slice(0).partition_fragment_B(sV);                          // (MMA, MMA_N, MMA_D)
  auto tdQrK = mma_sums.get_slice(0).partition_fragment_B(sKt);                          // (MMA, MMA_D, MMA_K)
  auto tSrS = partition_fragment_C(mma_scores, Shape<_64, _64>{});                       // (MMA, MMA_M, MMA_N)
  auto tSrdP = partition_fragment_C(mma_scores, Shape<_64, _64>{});                      // (MMA, MMA_M, MMA_N)
  auto scores = rowcol_view(tSrS);                                                       // (rows, keys)
  auto dscores = rowcol_view(tSrdP);                                                     // (rows, keys)
  auto rdS = make_tensor_like<Element>(tSrdP);                                           // (MMA, MMA_M, MMA_N)
  auto tdQrdS = make_tensor(rdS.data(), operand_a_layout_64(rdS.layout()));              // (MMA, MMA_M, MMA_K)
  auto tdQrdQ = partition_fragment_C(mma_sums, Shape<_64, Int<Traits::kHeadDim>>{});     // (MMA, MMA_M, MMA_D)
  auto cS = make_identity_tensor(Shape<_64, _64>{});  // (64, BLK_N) -> (row, key)
  auto tScS_0 = rowcol_view(mma_scores.get_slice(_0{}).partition_C(cS));  // (rows, keys) -> (row, key) of thread 0

  float lse_log2[2], delta[2];  // of this thread's two rows
  load_row_stats(params, tile, warpgroup, lse_log2, delta);

  constexpr bool kModified = Traits::kVariant.modifies_scores;
  [[maybe_unused]] backward::Reach reach = backward::Reach::kAny;  // of a softcap's scores
  [[maybe_unused]] float slope_log2 = 0.f;
  if constexpr (kModified) {
    reach = backward::reach_of_rows(params.score, params.scale_log2, lse_log2[0], lse_log2[1]);
    slope_log2 = params.scale_log2 * head_slope(params.score, tile.batch, tile.head);
  }

  // S and dP of a step. After the last step on stale data: the result is not used.
  struct Scores {
    int step;
    bool wait;  // for the key tile
  };
  auto issue_scores = [&](Scores next) __attribute__((always_inline)) {
    auto const [i, wait] = next;
    if (wait) smem.k_pipeline.wait_full(at_step(i));  // TMA: K has landed
    auto tSrQ_now = operands.at(tSrQ, smem.q[warpgroup]);  // (MMA, MMA_M, MMA_D)
    issue_gemm<Accumulate::kOverwrite>(mma_scores, tSrQ_now, operands.at(tSrK, smem.k[i & 1]), tSrS);
    if (wait) smem.v_pipeline.wait_full({0, i & 1});  // TMA: V has landed
    auto tSrdO_now = operands.at(tSrdO, smem.dout[warpgroup]);  // (MMA, MMA_M, MMA_D)
    issue_gemm<Accumulate::kOverwrite>(mma_scores, tSrdO_now, operands.at(tSrV, smem.v), tSrdP);
  };
  clear(tdQrdQ);
  if (range.begin < range.end) {
    smem.rows_pipeline[warpgroup].wait_full({});  // TMA: the warpgroup's rows of Q and dO have landed
    if (warpgroup == 1) named_sync(kHalfStep, Traits::kConsumerThreads);  // warpgroup 0 has issued its first dQ
    issue_scores({.step = 0, .wait = true});
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrS);
    warpgroup_fence_operand(tSrdP);
  }
#pragma unroll 1
  for (int i = 0; i < range.end - range.begin; ++i) {
    int n = range.end - 1 - i;
    smem.v_pipeline.release({0, i & 1});
    bool masked;
    if constexpr (Traits::kVariant.reads_mask) {
      KeyVisit const volatile& visit = smem.visits[i & 1];
      n = visit.n_block;
      masked = uniform(visit.masked[warpgroup]) != 0;
    } else {
      masked = range.needs_mask(n);
    }
    if constexpr (kModified) {
      if (reach == backward::Reach::kAny && params.score.softcap_scale != 0.f) cap_scores(tSrS, params.score);
    }
    if (masked) {
      auto tScS = rowcol_view(mma_scores.get_slice(threadIdx.x % 128).partition_C(cS));  // (rows, keys) -> (row, key)
      if constexpr (Traits::kVariant.reads_mask) {
        RowBits const* const columns = tile.columns + n * kKeys;
        if (params.mask.bits != nullptr) {
          int const thread = fresh_thread_index();
          WarpBits<kKeys> bits;
          bits.read(columns + warpgroup * tile.to_second_columns, thread / 32 % 4 * 16, thread % 32);
          bits.hide(scores, tScS_0, 0, thread % 32);
        } else {
          apply_intervals(scores, tScS, tScS_0, {columns, columns + tile.to_second_columns, false}, first_row);
        }
      } else {
        decltype(auto) lengths = lengths_of(params, tile);
        apply_mask(scores, tScS, tScS_0, lengths, first_row - n * kKeys, lengths.len_k - n * kKeys);
      }
    }
    if constexpr (kModified) {
      auto tScS = rowcol_view(mma_scores.get_slice(threadIdx.x % 128).partition_C(cS));  // (rows, keys) -> (row, key)
      auto const compute_with = [&](auto terms) __attribute__((always_inline)) {
        backward::TileBias bias{};
        if constexpr (backward::has_bias(terms)) {
          bias = {.slope_log2 = slope_log2, .offset = first_row - n * kKeys + shift_of(params, tile)};
        }
        compute_modified_ds<terms>(scores, dscores, tScS, tScS_0, params.score, params.scale_log2, bias, lse_log2,
                                   delta);
      };
      backward::with_terms(params.score, reach, compute_with);
    } else {
      compute_ds(scores, dscores, params.scale_log2, lse_log2, delta);
    }
    convert(tSrdP, rdS);
    issue_gemm<Accumulate::kAdd>(mma_sums, tdQrdS, operands.at(tdQrK, smem.k[i & 1]), tdQrdQ);
    if (i == 0 && warpgroup == 0) named_arrive(kHalfStep, Traits::kConsumerThreads);
    issue_scores({.step = i + 1, .wait = i + 1 < range.end - range.begin});
    warpgroup_wait<2>();  // dQ
    warpgroup_fence_operand(tdQrdQ);
    smem.k_pipeline.release(at_step(i));
    warpgroup_wait<0>();  // S and dP
    warpgroup_fence_operand(tSrS);
    warpgroup_fence_operand(tSrdP);
  }
  auto const& out = query_tile<Traits>(args, smem);
  int const out_row = out.m_block * QueryTile::kRows + warpgroup * 64;
  store_sums<Traits, Traits::kHeadDim>(args.dq, smem.q[warpgroup], warpgroup, tdQrdQ, params.scale, out_row, out.head,
                     origin_of_dq(params, out));
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) bwd_queries_kernel(__grid_constant__ KernelArgs const args) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::QueriesStorage*>(smem_raw);
  int const warpgroup = uniform(threadIdx.x / 128);

  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(&args.q);
    prefetch_tma_descriptor(&args.dout);
    prefetch_tma_descriptor(&args.k);
    prefetch_tma_descriptor(&args.v);
    if constexpr (Traits::kVariant.reads_sequences) find_query_tile(args.params, smem.tile);
    if constexpr (Traits::kVariant.reads_mask) find_query_tile(args, smem.tile);
    for (auto& pipeline : smem.rows_pipeline) pipeline.init(4);
    smem.k_pipeline.init(8);
    smem.v_pipeline.init(8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes the barriers visible to TMA
  }
  __syncthreads();  // thread 0 has initialised the barriers
  if (Traits::kVariant.reads_sequences && smem.tile.m_block < 0) return;  // there are fewer tiles than CTAs

  if (warpgroup == 0) {
    lower_max_registers<Traits::kProducerRegs>();
    if (threadIdx.x == 0) dq_producer<Traits>(args, smem);
  } else {
    raise_max_registers<Traits::kConsumerRegs>();
    dq_consumer<Traits>(args, smem, warpgroup - 1);
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_registers
