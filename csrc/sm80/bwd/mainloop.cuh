// The loop over row tiles: S^T = K Q^T, P^T, dP^T = V dO^T, dS^T, dV += P^T dO, dK += dS^T Q, dQ = dS K.
//
// Scores are computed transposed, (keys, rows), so that a thread's C fragments of P^T and dS^T are its A fragments for
// dV and dK. There are two schedules, by where P is kept:
//   registers: a warp owns 32 keys and all rows. For each part of 32 rows it computes scores, dV and dK without a
//              barrier; only dS goes through shared memory, for dQ.
//   shared memory: P and dS of the whole step are stored, then each warp computes its share of dV, dK and dQ.
#pragma once

#include <type_traits>

#include <cute/tensor.hpp>

#include "../../core/convert.cuh"
#include "../../core/layout.cuh"
#include "../../core/mask.cuh"
#include "../../core/softmax.cuh"
#include "dq.cuh"
#include "load.cuh"
#include "task.cuh"
#include "traits.cuh"
#include "../load_cp_async.cuh"

namespace flash_cute::sm80::bwd {

// acc += A B. fetch(k) loads both operands of k step k into registers, one step ahead of its MMA.
template <class Mma, class Acc, class FragA, class FragB, class Fetch>
CUTE_DEVICE void fetched_gemm(Mma const& mma,
                              Acc& acc,           // (MMA, MMA_M, MMA_N)
                              FragA const& tCrA,  // (MMA, MMA_M, MMA_K)
                              FragB const& tCrB,  // (MMA, MMA_N, MMA_K)
                              Fetch&& fetch) {
  CUTE_STATIC_ASSERT_V(size<2>(tCrA) == size<2>(tCrB));
  fetch(0);
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrA); ++k) {
    if (k + 1 < size<2>(tCrA)) fetch(k + 1);
    cute::gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
  }
}

// Ends a basic block, across which the compiler does not move instructions. If it may hoist loads here, most kernels
// spill 4 to 56 bytes, or are 1 to 7 % slower.
template <bool kDeterministic, bool kHere>
CUTE_DEVICE void end_basic_block(BwdParams const& params) {
  if constexpr (kHere) {
    if (params.deterministic != kDeterministic) __trap();  // never taken: each mode has its own kernel
  }
}

// Leaves P^T dO in tdVrdV and dS^T Q in tdKrdK.
template <class Traits, bool kDeterministic, class Accumulator>
CUTE_DEVICE void mainloop(BwdParams const& params, typename Traits::SharedStorage& smem,
                              Accumulator& tdKrdK,    // (MMA, MMA_N, MMA_D)
                              Accumulator& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kScoreRows = Traits::kScoreRows, kParts = Traits::kParts;
  constexpr bool kTwoQ = Traits::kQStages == 2, kTwoDout = Traits::kDoutStages == 2;
  constexpr bool kPInRegs = Traits::kPInRegs;
  // The deterministic kernels of head dim 128 have no register to spare. Chosen by experiment: with these settings no
  // kernel spills on sm_80, sm_90 or sm_120.
  constexpr bool kScarce = kDeterministic && kHeadDim == 128, kTight = kScarce && !kTwoQ;
  constexpr bool kEndsAfterAdding = !kScarce;
  constexpr bool kHalf64 = kHeadDim == 64 && std::is_same_v<Element, cutlass::half_t> && !kDeterministic;
  constexpr bool kRangeInRegs = !kTight && !kHalf64 && (kHeadDim != 96 || kTwoQ);
  bool const last_first = kDeterministic && kHeadDim > 64 && params.launch_order.last_first;
  KeyTile const tile(params, draw_task<kDeterministic>(params, reinterpret_cast<int*>(smem.ds)));

  // The row tiles [begin, end). The end is used seldom, and recomputed at each use to save its register.
  TileRange const range = row_range<kBlockM, kBlockN>(params, tile.n_block);
  if (range.begin == range.end) return;

  // Shared memory. A tile of Q or dO is one part of a stage.
  auto sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutQ{});             // (BLK_M / parts, D, tile)
  auto sQt = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutQt{});           // (D, BLK_M / parts, tile)
  auto sdO = make_tensor(make_smem_ptr(smem.dout), typename Traits::SmemLayoutDout{});      // (BLK_M / parts, D, tile)
  auto sdOt = make_tensor(make_smem_ptr(smem.dout), typename Traits::SmemLayoutDoutT{});    // (D, BLK_M / parts, tile)
  auto sK = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemLayoutK{})(_, _, _0{});    // (BLK_N, D)
  auto sKt = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemLayoutKt{})(_, _, _0{});  // (D, BLK_N)
  auto sV = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemLayoutK{})(_, _, _0{});    // (BLK_N, D)
  auto sPt = make_tensor(make_smem_ptr(smem.p), typename Traits::SmemLayoutSt{});             // (BLK_N, BLK_M)
  auto sdSt = make_tensor(make_smem_ptr(smem.ds), typename Traits::SmemLayoutSt{});           // (BLK_N, BLK_M)
  auto sdS = make_tensor(make_smem_ptr(smem.ds), typename Traits::SmemLayoutS{});             // (BLK_M, BLK_N)

  // The MMAs, and the copies from shared memory to registers.
  typename Traits::MmaScores mma_scores;
  typename Traits::MmaKeys mma_keys;
  typename Traits::MmaQueries mma_queries;
  typename Traits::SmemCopyAtom const along;
  typename Traits::SmemCopyAtomTransposed const across;
  typename Traits::SmemStoreAtom const store_atom;
  auto const scores_a = make_tiled_copy_A(along, mma_scores);
  auto const scores_b = make_tiled_copy_B(along, mma_scores);
  auto const scores_c = make_tiled_copy_C(store_atom, mma_scores);
  auto const keys_a = make_tiled_copy_A(along, mma_keys);
  auto const keys_b = make_tiled_copy_B(across, mma_keys);
  auto const queries_a = make_tiled_copy_A(across, mma_queries);
  auto const queries_b = make_tiled_copy_B(across, mma_queries);
  // Only the shape counts for a fragment: no swizzle, no data.
  auto fragment_a = [&](auto const& mma, auto shape) {
    return mma.get_slice(0).partition_fragment_A(make_tensor(static_cast<Element*>(nullptr), make_layout(shape)));
  };
  auto fragment_b = [&](auto const& mma, auto shape) {
    return mma.get_slice(0).partition_fragment_B(make_tensor(static_cast<Element*>(nullptr), make_layout(shape)));
  };

  auto lowest = [&] {
    return kScarce ? row_range<kBlockM, kBlockN>(params, opaque(tile.n_block)).begin : range.begin;
  };
  auto highest = [&] { return row_range<kBlockM, kBlockN>(params, opaque(tile.n_block)).end - 1; };
  auto first_tile = [&] { return last_first ? lowest() : highest(); };
  auto last_tile = [&] { return last_first ? highest() : lowest(); };
  auto tile_after = [&](RowTile row_tile) {
    row_tile.step(last_first, first_tile, last_tile, 1);
    return row_tile;
  };
  RowTile now{tile.head_kv * params.group, first_tile()};
  int const end_head = now.head + params.group;
  auto load_q = [&](RowTile const& row_tile, int stage) {
    auto sX = local_tile(sQ, Shape<Int<kScoreRows>, Int<kHeadDim>, Int<kParts>>{}, make_coord(_0{}, _0{}, stage));
    load_row_tile<Traits>(params, tile.batch, row_tile, params.q, params.q_strides, sX, params.lse_log2,
                          smem.lse_log2[stage]);
  };
  auto load_dout = [&](RowTile const& row_tile, int stage) {
    auto sX = local_tile(sdO, Shape<Int<kScoreRows>, Int<kHeadDim>, Int<kParts>>{}, make_coord(_0{}, _0{}, stage));
    load_row_tile<Traits>(params, tile.batch, row_tile, params.dout, params.dout_strides, sX, params.delta,
                          smem.delta[stage]);
  };

  // (keys, rows) -> (key, row), for thread 0: static.
  auto cS = make_identity_tensor(Shape<Int<kBlockN>, Int<kScoreRows>>{});
  auto tScS_0 = rowcol_view(mma_scores.get_slice(_0{}).partition_C(cS));

  // K Q^T or V dO^T for one part of a row tile.
  auto scores_product = [&](auto const& sA, auto const& sB, auto& acc) {
    int const local = fresh_thread_index();
    auto tSrA = fragment_a(mma_scores, Shape<Int<kBlockN>, Int<kHeadDim>>{});     // (MMA, MMA_N, MMA_D)
    auto tSrB = fragment_b(mma_scores, Shape<Int<kScoreRows>, Int<kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
    auto const copy_a = scores_a.get_slice(local);
    auto const copy_b = scores_b.get_slice(local);
    auto tSsA = copy_a.partition_S(sA);      // (CPY, CPY_N, CPY_D)
    auto tSsB = copy_b.partition_S(sB);      // (CPY, CPY_M, CPY_D)
    auto tSrA_copy = copy_a.retile_D(tSrA);  // (CPY, CPY_N, CPY_D)
    auto tSrB_copy = copy_b.retile_D(tSrB);  // (CPY, CPY_M, CPY_D)
    clear(acc);
    fetched_gemm(mma_scores, acc, tSrA, tSrB, [&](int k) {
      copy(scores_a, tSsA(_, _, k), tSrA_copy(_, _, k));
      copy(scores_b, tSsB(_, _, k), tSrB_copy(_, _, k));
    });
  };

  // Points to the statistic of this thread's first row in a part. The thread's rows come in pairs of neighbours.
  auto thread_stats = [&](float const* stat, int part) {
    auto tScS = mma_scores.get_slice(fresh_thread_index()).partition_C(cS);  // (MMA, MMA_N, MMA_M) -> (key, row)
    return stat + part * kScoreRows + get<1>(tScS(_0{}, _0{}, _0{}));
  };
  auto two_rows = [&](float const* stats, int pair) {
    return *reinterpret_cast<float2 const*>(stats + get<1>(tScS_0(_0{}, 2 * pair)));
  };
  // Maps a pair of rows to their statistic. With P in shared memory and one CTA per SM, all pairs are read at once,
  // before a GEMM that hides the latency of shared memory.
  constexpr bool kStatsAhead = !kPInRegs && Traits::kTile.ctas_per_sm == 1;
  auto read_stats = [&](float const* stat, int part) {
    float const* const stats = thread_stats(stat, part);
    if constexpr (!kStatsAhead) {
      return [&two_rows, stats](int pair) { return two_rows(stats, pair); };
    } else {
      auto pairs = make_tensor<float2>(Int<decltype(size<1>(tScS_0))::value / 2>{});
      CUTE_UNROLL
      for (int pair = 0; pair < size(pairs); ++pair) pairs(pair) = two_rows(stats, pair);
      return pairs;
    }
  };

  auto n_block = [&] { return opaque(tile.n_block); };
  auto semaphore = [&](RowTile const& row_tile) { return params.semaphores + row_tile.index(params, opaque(tile.batch)); };
  // Deterministic mode: thread 0 ends a turn at a row tile, and thread 32, in another warp, waits for the next turn.
  // The turn of the step before is ended after a barrier that follows the adds of all threads.
  auto end_turn_before = [&](RowTile row_tile) {
    row_tile.step(!last_first, last_tile, first_tile, -1);
    if (row_tile.head >= opaque(tile.head_kv) * params.group) end_turn(semaphore(row_tile));
  };
  // The turn is awaited before the barrier after which all threads add: it arrives when the key tiles that come earlier
  // in the order have added to this row tile. The semaphore is first read at the beginning of the step (`ended`), which
  // hides the latency; up to head dim 64 that does not pay, and at 128 there is no register for it.
  constexpr bool kLooksAhead = kHeadDim > 64 && !kScarce;
  auto wait_turn = [&](int ended) {
    KeyTiles const visiting = visiting_key_tiles<kBlockM, kBlockN>(params, now.m_block);
    int const turn = last_first ? visiting.end - 1 - n_block() : n_block() - visiting.begin;
    while (ended < turn) ended = turns_ended(semaphore(now));
  };

  // S^T to P^T.
  auto make_p = [&](auto& tSrS, int m_block, int part, auto const& lse_log2) {
    auto p = rowcol_view(tSrS);  // (keys, rows)
    int const row = m_block * kBlockM + part * kScoreRows, column = n_block() * kBlockN;
    bool const edge = kRangeInRegs ? range.needs_mask(m_block)
                                   : crosses_band<kBlockM, kBlockN>(params, m_block * kBlockM - column) ||
                                         column + kBlockN > params.len_k;
    if (edge) {
      auto const thread_mma = mma_scores.get_slice(fresh_thread_index());
      auto tScS = rowcol_view(thread_mma.partition_C(cS));  // (keys, rows) -> (key, row)
      apply_mask_transposed(p, tScS, tScS_0, params, row, column);
    }
    CUTE_UNROLL
    for (int j = 0; j < size<1>(p); j += 2) {
      float2 const lse = lse_log2(j / 2);
      CUTE_UNROLL
      for (int i = 0; i < size<0>(p); ++i) {
        p(i, j) = exp2_approx(p(i, j) * params.scale_log2 - lse.x);
        p(i, j + 1) = exp2_approx(p(i, j + 1) * params.scale_log2 - lse.y);
      }
    }
  };

  // dP^T to dS^T.
  auto make_ds = [&](auto& tSrdP, auto const& tSrP, auto const& deltas) {
    auto ds = rowcol_view(tSrdP);  // (keys, rows)
    auto p = rowcol_view(tSrP);    // (keys, rows)
    CUTE_UNROLL
    for (int j = 0; j < size<1>(p); j += 2) {
      float2 const delta = deltas(j / 2);
      CUTE_UNROLL
      for (int i = 0; i < size<0>(p); ++i) {
        ds(i, j) = float(p(i, j)) * (ds(i, j) - delta.x);
        ds(i, j + 1) = float(p(i, j + 1)) * (ds(i, j + 1) - delta.y);
      }
    }
  };

  // Stores a part of P^T or dS^T to shared memory.
  auto store_scores = [&](auto const& rX, auto const& sX, int part) {
    auto const thread_copy = scores_c.get_slice(fresh_thread_index());
    auto tXrX = thread_copy.retile_S(rX);     // (CPY, CPY_N, CPY_M / parts)
    auto tXsX = thread_copy.partition_D(sX);  // (CPY, CPY_N, CPY_M)
    CUTE_UNROLL
    for (int j = 0; j < size<2>(tXrX); ++j) copy(store_atom, tXrX(_, _, j), tXsX(_, _, part * size<2>(tXrX) + j));
  };

  // acc += A B for dV or dK, for one part of a row tile; A is in registers, or loaded by fetch_a(k).
  auto keys_product = [&](auto& acc, auto& tCrA, auto const& sB, auto&& fetch_a) {
    auto tCrB = fragment_b(mma_keys, Shape<Int<kHeadDim>, Int<kScoreRows>>{});  // (MMA, MMA_D, MMA_M)
    auto const copy_b = keys_b.get_slice(fresh_thread_index());
    auto tCsB = copy_b.partition_S(sB);      // (CPY, CPY_D, CPY_M)
    auto tCrB_copy = copy_b.retile_D(tCrB);  // (CPY, CPY_D, CPY_M)
    fetched_gemm(mma_keys, acc, tCrA, tCrB, [&](int k) {
      fetch_a(k);
      copy(keys_b, tCsB(_, _, k), tCrB_copy(_, _, k));
    });
  };
  auto keys_product_smem = [&](auto& acc, auto const& sA, auto const& sB, auto&& beside) {
    auto tCrA = fragment_a(mma_keys, Shape<Int<kBlockN>, Int<kScoreRows>>{});  // (MMA, MMA_N, MMA_M)
    auto const copy_a = keys_a.get_slice(fresh_thread_index());
    auto tCsA = copy_a.partition_S(sA);      // (CPY, CPY_N, CPY_M)
    auto tCrA_copy = copy_a.retile_D(tCrA);  // (CPY, CPY_N, CPY_M)
    keys_product(acc, tCrA, sB, [&](int k) {
      copy(keys_a, tCsA(_, _, k), tCrA_copy(_, _, k));
      beside(k);
    });
  };

  auto make_dq = [&] {
    auto tdQrdQ = partition_fragment_C(mma_queries, Shape<Int<kBlockM>, Int<kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
    auto tdQrdS = fragment_a(mma_queries, Shape<Int<kBlockM>, Int<kBlockN>>{});             // (MMA, MMA_M, MMA_N)
    auto tdQrK = fragment_b(mma_queries, Shape<Int<kHeadDim>, Int<kBlockN>>{});             // (MMA, MMA_D, MMA_N)
    int const local = fresh_thread_index();
    auto const copy_a = queries_a.get_slice(local);
    auto const copy_b = queries_b.get_slice(local);
    auto tdQsdS = copy_a.partition_S(sdS);       // (CPY, CPY_M, CPY_N)
    auto tdQsK = copy_b.partition_S(sKt);        // (CPY, CPY_D, CPY_N)
    auto tdQrdS_copy = copy_a.retile_D(tdQrdS);  // (CPY, CPY_M, CPY_N)
    auto tdQrK_copy = copy_b.retile_D(tdQrK);    // (CPY, CPY_D, CPY_N)
    clear(tdQrdQ);
    fetched_gemm(mma_queries, tdQrdQ, tdQrdS, tdQrK, [&](int k) {
      copy(queries_a, tdQsdS(_, _, k), tdQrdS_copy(_, _, k));
      copy(queries_b, tdQsK(_, _, k), tdQrK_copy(_, _, k));
    });
    return tdQrdQ;
  };
  // Adds dQ to global memory. `add_parts` calls add(i) for each part i < count, so that the adds can be interleaved
  // with the k steps of a GEMM.
  auto add_to_memory = [&](RowTile const& row_tile, auto const& tdQrdQ, auto count, auto&& add_parts) {
    int64_t const index = row_tile.index(params, opaque(tile.batch));
    float* const sums = params.dq_acc + index * (kBlockM * kHeadDim) + fresh_thread_index();
    end_basic_block<kDeterministic, true>(params);
    add_parts([&](int part) { add_dq<Traits, decltype(count)::value>(sums, tdQrdQ, part); });
    end_basic_block<kDeterministic, kEndsAfterAdding>(params);
  };

  // Prologue: K, V, and the first row tile of Q and dO.
  auto load_keys = [&](void const* base, Strides const& strides, auto& sX) {
    load_tile<false>(typename Traits::GmemLoad{},
                     static_cast<Element const*>(base) + tile.batch * strides.batch + tile.head_kv * strides.head +
                         tile.n_block * kBlockN * strides.row,
                     strides.row, sX, params.len_k - tile.n_block * kBlockN, params.head_dim);
  };
  load_keys(params.k, params.k_strides, sK);
  load_q(now, 0);
  load_keys(params.v, params.v_strides, sV);
  load_dout(now, 0);
  cp_async_fence();

  for (int stage = 0; now.head < end_head; stage ^= 1) {
    int const q_stage = kTwoQ ? stage : 0, dout_stage = kTwoDout ? stage : 0;
    RowTile const next = tile_after(now);
    bool const more = next.head < end_head;
    cp_async_wait<0>();  // this thread's copies of Q and dO have landed
    __syncthreads();     // those of all threads have; and all have finished the step before, so its buffers are free
    int ended = 0;
    if constexpr (kDeterministic) {
      if (fresh_thread_index() == 0) end_turn_before(now);
      if (kLooksAhead && fresh_thread_index() == 32) ended = turns_ended(semaphore(now));
    }
    end_basic_block<kDeterministic, !kDeterministic && kPInRegs>(params);
    if (kTwoQ && more) load_q(next, stage ^ 1);
    if (kTwoDout && more) load_dout(next, stage ^ 1);

    if constexpr (kPInRegs) {
      CUTE_UNROLL
      for (int part = 0; part < kParts; ++part) {
        auto tSrS = partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kScoreRows>>{});  // (MMA, MMA_N, MMA_M)
        scores_product(sK, sQ(_, _, q_stage * kParts + part), tSrS);
        make_p(tSrS, now.m_block, part, read_stats(smem.lse_log2[q_stage], part));
        auto rP = make_tensor_like<Element>(tSrS);  // (MMA, MMA_N, MMA_M)
        convert(tSrS, rP);
        auto tdVrP = make_tensor(rP.data(), operand_a_layout(rP.layout()));  // (MMA, MMA_N, MMA_K)
        auto tSrdP = partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kScoreRows>>{});  // (MMA, MMA_N, MMA_M)
        scores_product(sV, sdO(_, _, dout_stage * kParts + part), tSrdP);
        keys_product(tdVrdV, tdVrP, sdOt(_, _, dout_stage * kParts + part), [](int) {});
        make_ds(tSrdP, rP, read_stats(smem.delta[dout_stage], part));
        auto rdS = make_tensor_like<Element>(tSrdP);  // (MMA, MMA_N, MMA_M)
        convert(tSrdP, rdS);
        store_scores(rdS, sdSt, part);
        auto tdKrdS = make_tensor(rdS.data(), operand_a_layout(rdS.layout()));  // (MMA, MMA_N, MMA_K)
        keys_product(tdKrdK, tdKrdS, sQt(_, _, q_stage * kParts + part), [](int) {});
      }
      if (kDeterministic && fresh_thread_index() == 32) wait_turn(ended);
      __syncthreads();  // all threads have stored dS, and have finished reading Q and dO
      if (!kTwoQ && more) load_q(next, 0);
      if (!kTwoDout && more) load_dout(next, 0);
      cp_async_fence();
      add_to_memory(now, make_dq(), _1{}, [](auto&& add) { add(0); });
    } else {
      {
        auto tSrS = partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kScoreRows>>{});   // (MMA, MMA_N, MMA_M)
        auto tSrdP = partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kScoreRows>>{});  // (MMA, MMA_N, MMA_M)
        scores_product(sK, sQ(_, _, q_stage), tSrS);
        auto const lse_log2 = read_stats(smem.lse_log2[q_stage], 0);
        auto const delta = read_stats(smem.delta[dout_stage], 0);
        scores_product(sV, sdO(_, _, dout_stage), tSrdP);
        make_p(tSrS, now.m_block, 0, lse_log2);
        make_ds(tSrdP, tSrS, delta);
        auto rP = make_tensor_like<Element>(tSrS);    // (MMA, MMA_N, MMA_M)
        auto rdS = make_tensor_like<Element>(tSrdP);  // (MMA, MMA_N, MMA_M)
        convert(tSrS, rP);
        convert(tSrdP, rdS);
        store_scores(rP, sPt, 0);
        store_scores(rdS, sdSt, 0);
      }
      if (kDeterministic && fresh_thread_index() == 32) wait_turn(ended);
      end_basic_block<kDeterministic, !kDeterministic || kTight>(params);
      __syncthreads();  // all threads have stored P and dS
      auto const nothing = [](int) {};
      keys_product_smem(tdVrdV, sPt, sdOt(_, _, dout_stage), nothing);
      if constexpr (kTwoQ) {
        if constexpr (!kTwoDout) {
          __syncthreads();  // all threads have finished reading dO: its only buffer is free
          if (more) load_dout(next, 0);
        }
        cp_async_fence();
        auto const tdQrdQ = make_dq();  // (MMA, MMA_M, MMA_D)
        add_to_memory(now, tdQrdQ, Int<kBlockM / 16>{},
                      [&](auto&& add) { keys_product_smem(tdKrdK, sdSt, sQt(_, _, q_stage), add); });
      } else {
        keys_product_smem(tdKrdK, sdSt, sQt(_, _, q_stage), nothing);
        __syncthreads();  // all threads have finished reading Q and dO: their only buffers are free
        // Recomputed: kept across the GEMMs, it spilled.
        RowTile const next_again = tile_after({opaque(now.head), opaque(now.m_block)});
        if (more) load_q(next_again, 0);
        if (more) load_dout(next_again, 0);
        cp_async_fence();
        add_to_memory(now, make_dq(), _1{}, [](auto&& add) { add(0); });
      }
    }
    now = next;
  }
  cp_async_wait<0>();
  if constexpr (kDeterministic) {
    __syncthreads();  // all threads have added dQ of the last step
    if (fresh_thread_index() == 0) end_turn_before(now);
  }
}

}  // namespace flash_cute::sm80::bwd
