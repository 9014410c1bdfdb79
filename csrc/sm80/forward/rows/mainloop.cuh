// The loop over key tiles: S = Q K^T, mask, online softmax, O += P V, from the last tile to the first.
//
// All warps load (cp.async) and all compute. A warp owns whole rows of Q, S, P and O, so that a step needs barriers
// only where a K or V buffer is refilled:
//   two stages: K and V of tile n-1 are in flight during the whole step of tile n; one barrier per step.
//   one stage:  V(n) is in flight during S = Q K(n), K(n-1) during softmax and O += P V(n); two barriers per step.
#pragma once

#include <cute/tensor.hpp>

#include "core/bits_mask.cuh"
#include "core/convert.cuh"
#include "core/interval_mask.cuh"
#include "core/layout.cuh"
#include "core/mask.cuh"
#include "core/place.cuh"
#include "core/score.cuh"
#include "contract/tile_order.h"
#include "core/softmax.cuh"
#include "key_tiles.cuh"
#include "products.cuh"
#include "traits.cuh"
#include "sm80/common/load_cp_async.cuh"

namespace flash_cute::sm80::forward::rows {

// As cap_scores. ptxas would turn the branch into predicates, and issue the instructions of both ways; not those of a
// loop.
template <class Scores>
CUTE_DEVICE void cap_scores_in_one_way(Scores& scores, ScoreTerms const& terms) {  // (rows, columns)
  if (exceed_polynomial(scores, terms.softcap)) {
#pragma unroll 1
    for (int times = opaque(1); times > 0; --times) cap_scores_by_tanh(scores, terms);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) *= softcap_factor(terms.softcap.c, scores(i) * scores(i));
  }
}

// Leaves the unnormalized O in tOrO and the row statistics in softmax.
//
// A long function: its parts, the lambdas, work on the same dozen of tensors and pipeline states, which functions would
// all take as arguments. `step` is a key tile; key_tiles.cuh has the loops over them.
template <class Traits, class Lengths, class Softmax, class Accumulator>
CUTE_DEVICE void mainloop(FwdParams const& params, Lengths const& sequence, RowTileCoord const& tile,
                          typename Traits::Storage& smem, Softmax& softmax,
                          Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  constexpr bool kTwoStages = Traits::kStages == 2, kQInRegs = Traits::kTile.q_in_regs;
  int const thread = threadIdx.x;
  int const head_kv = tile.head / (params.heads_q / params.heads_kv);

  VisitedTiles<Traits, Lengths> tiles(params, sequence, tile, smem);
  if (tiles.empty()) return;

  // Shared memory.
  auto sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutQ{});    // (BLK_M, D)
  auto sK = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemLayoutKV{});   // (BLK_N, D, stage)
  auto sV = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemLayoutKV{});   // (BLK_N, D, stage)
  auto sVt = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemLayoutVt{});  // (D, BLK_N, stage)
  // The same without the swizzle, since CuTe derives a fragment's shape from a plain layout.
  auto sVt_plain = make_tensor(make_smem_ptr(smem.v), get_nonswizzle_portion(typename Traits::SmemLayoutVt{}));

  // Global memory: pointers to the tile of Q, and to the next tiles of K and V to load.
  typename Traits::GmemLoad gmem_load;
  auto tile_begin = [&](void const* base, Strides const& strides, int head, int row) {
    return static_cast<Element const*>(base) + tile.batch * strides.batch + head * strides.head + row * strides.row;
  };
  Element const* gQ = tile_begin(params.q, params.q_strides, tile.head, tile.m_block * kBlockM);
  Element const* gK = tile_begin(params.k, params.k_strides, head_kv, tiles.first() * kBlockN);
  Element const* gV = tile_begin(params.v, params.v_strides, head_kv, tiles.first() * kBlockN);
  gQ += first_row(sequence) * params.q_strides.row;
  gK += first_key(sequence) * params.k_strides.row;
  gV += first_key(sequence) * params.v_strides.row;

  // The MMAs, and the copies from shared memory to registers.
  typename Traits::Mma mma;
  auto const mma_thread = mma.get_slice(thread);
  auto tSrQ = mma_thread.partition_fragment_A(sQ);                      // (MMA, MMA_M, MMA_D)
  auto tSrK = mma_thread.partition_fragment_B(sK(_, _, _0{}));          // (MMA, MMA_N, MMA_D)
  auto tOrV = mma_thread.partition_fragment_B(sVt_plain(_, _, _0{}));   // (MMA, MMA_D, MMA_N)
  auto const copy_q = make_tiled_copy_A(typename Traits::SmemCopyAtom{}, mma);
  auto const copy_k = make_tiled_copy_B(typename Traits::SmemCopyAtom{}, mma);
  auto const copy_v = make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, mma);
  auto tSsQ = copy_q.get_slice(thread).partition_S(sQ);      // (CPY, CPY_M, CPY_D)
  auto tSrQ_copy = copy_q.get_slice(thread).retile_D(tSrQ);  // (CPY, CPY_M, CPY_D)
  auto tSrK_copy = copy_k.get_slice(_0{}).retile_D(tSrK);    // (CPY, CPY_N, CPY_D)
  auto tOsV = copy_v.get_slice(thread).partition_S(sVt);     // (CPY, CPY_D, CPY_N, stage)
  auto tOrV_copy = copy_v.get_slice(_0{}).retile_D(tOrV);    // (CPY, CPY_D, CPY_N)
  CUTE_STATIC_ASSERT_V(size<1>(tSsQ) == size<1>(tSrQ_copy) && size<2>(tSsQ) == size<2>(tSrQ_copy));
  CUTE_STATIC_ASSERT_V(size<1>(tOsV) == size<1>(tOrV_copy) && size<2>(tOsV) == size<2>(tOrV_copy));

  // ptxas moves what depends on a special register out of the loops, and some kernels then spill. What depends on
  // shared memory stays where it is.
  auto thread_again = [&] {
    if constexpr (Traits::kRecomputes) {
      return fresh_thread_index() + smem.tile.zero;
    } else {
      return fresh_thread_index();
    }
  };
  // The first row of K's tile n. Loads, too, run from the last tile to the first. Where registers are short it is found
  // again from the sequence's first key, whose address is in shared memory.
  auto tile_of_k = [&](int n) {
    if constexpr (Traits::kRereads) {
      return static_cast<Element const*>(smem.tile.k) + int64_t{opaque(n) * kBlockN} * params.k_strides.row;
    } else {
      Element const* const current = gK;
      gK -= kBlockN * params.k_strides.row;
      return current;
    }
  };
  auto tile_of_v = [&](int n) {
    if constexpr (Traits::kRereads) {
      return static_cast<Element const*>(smem.tile.v) + int64_t{opaque(n) * kBlockN} * params.v_strides.row;
    } else {
      Element const* const current = gV;
      gV -= kBlockN * params.v_strides.row;
      return current;
    }
  };
  // Only the last tile can reach past len_k.
  auto load_k = [&](int n, int stage, auto kind) {
    load_tile<decltype(kind)::kRowCheck>(gmem_load, tile_of_k(n), params.k_strides.row, sK(_, _, stage),
                                         sequence.len_k - n * kBlockN, params.head_dim, thread_again());
  };
  auto load_v = [&](int n, int stage, auto kind) {
    load_tile<decltype(kind)::kRowCheck>(gmem_load, tile_of_v(n), params.v_strides.row, sV(_, _, stage),
                                         sequence.len_k - n * kBlockN, value_columns<Traits>(params), thread_again());
  };

  // What a mask says of the tile's columns. With two stages it comes with K, else with V.
  auto load_columns = [&](int n, int stage) {
    if constexpr (Traits::kVariant.reads_mask) {
      constexpr int kPairs = kBlockN / 2;  // of columns, 16 bytes each
      static_assert(kMaxIntervals * kPairs <= Traits::kThreads && kBlockM <= kMaxIntervals * kBitRows);
      int const pair = thread_again();
      if (pair >= smem.tile.per_column * kPairs) return;
      RowBits const* const source = smem.tile.columns + n * kBlockN + 2 * (pair % kPairs);
      SM80_CP_ASYNC_CACHEALWAYS<uint128_t>::copy(
          *reinterpret_cast<uint128_t const*>(source + (pair / kPairs) * smem.tile.per_column_stride),
          *reinterpret_cast<uint128_t*>(smem.columns[stage] + 2 * pair));
    }
  };
  auto mask_scores = [&](auto& scores, auto const& tScS, auto const& tScS_0, int stage) {
    if constexpr (Traits::kVariant.reads_mask) {
      RowBits const* const columns = smem.columns[stage];
      if (params.mask.bits == nullptr) {
        apply_interval_mask<kBlockN>(scores, tScS, tScS_0, tile.m_block * kBlockM,
                                     reinterpret_cast<RowInterval const*>(columns), params.mask.intervals_per_column);
        return;
      }
      // A thread has two rows of each 16 * kWarps; the bits of blocks of rows past len_q are any.
      int const thread = thread_again();
      CUTE_UNROLL
      for (int i = 0; i < size<0>(scores); i += 2) {
        int const row = thread / 32 * 16 + i / 2 * (16 * Traits::kWarps);
        WarpBits<kBlockN> bits;
        bits.read(columns + row / kBitRows * kBlockN, row % kBitRows, thread % 32);
        bits.hide(scores, tScS_0, i, thread % 32);
      }
    }
  };
  auto step = [&](int n, int stage, auto kind) __attribute__((always_inline)) {
    cp_async_wait<0>();  // this thread's copies of K(n), and with two stages of V(n), have landed
    __syncthreads();     // those of all threads have; and all have finished reading tile n+1: its buffers are free
    if constexpr (kTwoStages) {
      if (tiles.has_next(n)) {
        load_k(tiles.next(n), stage ^ 1, Whole{});
        load_v(tiles.next(n), stage ^ 1, Whole{});
        load_columns(tiles.next(n), stage ^ 1);
      }
    } else {
      load_v(n, 0, kind);
      if constexpr (decltype(kind)::kMasked) load_columns(n, 0);
    }
    cp_async_fence();

    auto tSrS = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
    auto tSsK = copy_k.get_slice(thread_again()).partition_S(sK);          // (CPY, CPY_N, CPY_D, stage)
    CUTE_STATIC_ASSERT_V(size<1>(tSsK) == size<1>(tSrK_copy) && size<2>(tSsK) == size<2>(tSrK_copy));
    auto multiply_qk = [&](auto const& tSsQ_now) {  // (CPY, CPY_M, CPY_D)
      Traits::Products::multiply_qk(mma, tSrS, tSrQ, tSrK, [&](int k) {
        copy(copy_k, tSsK(_, _, k, stage), tSrK_copy(_, _, k));
        if constexpr (!kQInRegs) copy(copy_q, tSsQ_now(_, _, k), tSrQ_copy(_, _, k));
      });
    };
    if constexpr (Traits::kRecomputesQ) {
      multiply_qk(copy_q.get_slice(thread_again()).partition_S(sQ));
    } else {
      multiply_qk(tSsQ);
    }

    if constexpr (!kTwoStages) {
      cp_async_wait<0>();  // this thread's copies of V(n) have landed
      __syncthreads();     // those of all threads have; and all have finished reading K(n): its buffer is free
      if (tiles.has_next(n)) load_k(tiles.next(n), 0, Whole{});
      cp_async_fence();
    }

    auto scores = rowcol_view(tSrS);  // (rows, columns)
    auto cS = make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{});
    auto tScS_0 = rowcol_view(mma.get_slice(_0{}).partition_C(cS));  // (rows, columns) -> (row, column) of thread 0
    if constexpr (Traits::kVariant.modifies_scores) {
      auto tScS = rowcol_view(mma.get_slice(thread_again()).partition_C(cS));  // the same of this one
      int const first_position = tile.m_block * kBlockM + shift_of(sequence);
      int const offset = first_position - n * kBlockN;
      if (params.score.softcap_scale != 0.f) cap_scores_in_one_way(scores, params.score);
      if (smem.tile.slope != 0.f) add_biases(scores, tScS_0, smem.tile.slope, offset + thread_distance(tScS));
    }
    if constexpr (decltype(kind)::kMasked) {
      auto tScS = rowcol_view(mma.get_slice(thread_again()).partition_C(cS));
      if constexpr (Traits::kVariant.reads_mask) {
        mask_scores(scores, tScS, tScS_0, stage);
      } else {
        apply_mask(scores, tScS, tScS_0, sequence, tile.m_block * kBlockM - n * kBlockN, sequence.len_k - n * kBlockN);
      }
    }
    auto acc = rowcol_view(tOrO);  // (rows, head dim)
    softmax.update_max(scores, acc);
    softmax.numerators(scores);

    auto rP = make_tensor_like<Element>(tSrS);  // (MMA, MMA_M, MMA_N)
    convert(tSrS, rP);
    auto tOrP = make_tensor(rP.data(), operand_a_layout(rP.layout()));  // (MMA, MMA_M, MMA_K)
    if constexpr (Traits::kRecomputes) {
      auto tOsV_again = copy_v.get_slice(thread_again()).partition_S(sVt);  // (CPY, CPY_D, CPY_N, stage)
      Traits::Products::multiply_pv(mma, tOrO, tOrP, tOrV, [&](auto d, int k) {
        copy(copy_v, tOsV_again(_, d, k, stage), tOrV_copy(_, d, k));
      });
    } else {
      Traits::Products::multiply_pv(mma, tOrO, tOrP, tOrV, [&](auto d, int k) {
        copy(copy_v, tOsV(_, d, k, stage), tOrV_copy(_, d, k));
      });
    }
  };

  int const rows = sequence.len_q - tile.m_block * kBlockM;
  load_tile<RowCheck::kEach>(gmem_load, gQ, params.q_strides.row, sQ, rows, params.head_dim);
  cp_async_fence();
  load_k(tiles.first(), 0, UpperEdge{});
  if constexpr (kTwoStages) {
    load_v(tiles.first(), 0, UpperEdge{});
    load_columns(tiles.first(), 0);
  }
  cp_async_fence();
  if constexpr (Traits::Products::kScalesQ) {
    cp_async_wait<1>();  // this thread's copies of Q have landed; the first step's barrier shows the result to all
    Traits::Products::scale_q(params.scale_log2, sQ);
  }
  if constexpr (kQInRegs) {
    cp_async_wait<1>();  // this thread's copies of Q have landed; those of K may still be in flight
    __syncthreads();     // those of all threads have
    copy(copy_q, tSsQ, tSrQ_copy);
  }

  tiles.for_each(step);
  softmax.template finish<Element>();
}

}  // namespace flash_cute::sm80::forward::rows
