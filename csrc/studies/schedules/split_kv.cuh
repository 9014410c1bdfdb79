// split_kv: the warps divide the keys of a tile, as in FlashAttention-1's kernels. Each warp computes S of all rows of
// the CTA and its own keys, and sums P V over these keys in registers; no warp knows a whole row:
//   every step   the rows' maxima are exchanged through shared memory, so that all warps scale alike
//   at the end   the rows' sums and the warps' parts of O are added up through shared memory
//
// A step has two barriers: K(n) (two stages: and V(n)) has landed and V(n+1) is read; the maxima of tile n are there
// (one stage: and V(n) has landed and K(n) is read). With two stages the loads of tile n-1 run during the whole step.
#pragma once

#include "sm80/forward/rows/epilogue.cuh"
#include "pieces.cuh"

namespace flash_cute::studies::schedules {

struct SplitKv {
  template <class Traits>
  CUTE_DEVICE static void compute_tile(FwdParams const& params, RowTileCoord const& tile, int /*part*/,
                                       typename Traits::Storage& smem) {
    using Element = typename Traits::Element;
    typename Traits::MmaO mma_o;
    auto tOrO = partition_fragment_C(mma_o, Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});
    clear(tOrO);  // (MMA, MMA_M, MMA_D) of this warp's keys
    OnlineSoftmax<2 * decltype(size<1>(tOrO))::value> softmax(params.scale_log2, params.power_scale);
    mainloop<Traits>(params, tile, smem, softmax, tOrO);
    softmax.template finish<Element>();
    __syncthreads();  // all have read V(begin), which the sums overwrite, and the last maxima
    add_up<Traits>(smem, softmax, tOrO);

    // From here on as if warps owned their rows all along.
    typename Traits::Mma mma;
    auto const mma_thread = mma.get_slice(threadIdx.x);
    auto sSum = make_tensor(make_smem_ptr(smem.sum), typename Traits::SmemLayoutSum{});  // (BLK_M, D)
    auto tSumrSum = partition_fragment_C(mma, shape(sSum));                              // (MMA, MMA_M, MMA_D)
    copy(mma_thread.partition_C(sSum), tSumrSum);
    auto rows = rowcol_view(mma_thread.partition_C(make_identity_tensor(shape(sSum))));  // (rows, columns)
    OnlineSoftmax<2 * decltype(size<1>(tSumrSum))::value> total(params.scale_log2, params.power_scale);
    CUTE_UNROLL
    for (int i = 0; i < size<0>(rows); ++i) {
      int const row = get<0>(rows(i, _0{}));
      total.offset[i] = smem.row_offsets[row];
      CUTE_UNROLL
      for (int warp = 0; warp < Traits::kWarps; ++warp) total.sum[i] += smem.row_parts[row][warp];
    }
    rows::epilogue<Traits>(params, params, tile, smem, total, tSumrSum);
  }

 private:
  // Updates the maximum over all warps of the rows that need it, and rescales this warp's part of O and its sums.
  // wait_keys() runs before the barrier that makes the maxima visible, load_keys() after it.
  template <class Traits, class Softmax, class Scores, class Accumulator, class Coords, class Wait, class Load>
  CUTE_DEVICE static void exchange_maxima(typename Traits::Storage& smem, Softmax& softmax,
                                          Scores const& scores,  // (rows, columns)
                                          Accumulator&& acc,     // (rows, head dim)
                                          Coords const& tScS,    // (rows, columns) -> (row, column)
                                          Wait&& wait_keys, Load&& load_keys) {
    constexpr int kRows = decltype(size<0>(scores))::value;
    auto const max = [](float a, float b) { return fmaxf(a, b); };
    int const warp = threadIdx.x / 32;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float own = scores(i, _0{});
      CUTE_UNROLL
      for (int j = 1; j < size<1>(scores); ++j) own = fmaxf(own, scores(i, j));
      own = quad_reduce(own, max);
      if (threadIdx.x % 4 == 0) smem.row_parts[get<0>(tScS(i, _0{}))][warp] = own;
    }
    wait_keys();
    __syncthreads();
    load_keys();
    bool grown = false;
    float offset[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      auto const of_warps = *reinterpret_cast<float4 const*>(smem.row_parts[get<0>(tScS(i, _0{}))]);
      float const row_max = max(max(of_warps.x, of_warps.y), max(of_warps.z, of_warps.w));
      offset[i] = fmaxf(softmax.offset[i], row_max * softmax.row_scale(row_max * softmax.scale_log2));
      grown |= offset[i] > softmax.offset[i];
    }
    if (!__any_sync(0xffffffff, grown)) return;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const factor = exp2_approx(softmax.offset[i] - offset[i]);
      softmax.offset[i] = offset[i];
      softmax.sum[i] *= factor;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(acc); ++j) acc(i, j) *= factor;
    }
  }

  template <class Traits, class Softmax, class Accumulator>
  CUTE_DEVICE static void mainloop(FwdParams const& params, RowTileCoord const& tile, typename Traits::Storage& smem,
                                   Softmax& softmax,
                                   Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
    using Element = typename Traits::Element;
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    constexpr bool kTwoStages = Traits::kStages == 2;
    using CopyAtom = typename Traits::SmemCopyAtom;
    TileRange const range = key_range<kBlockM, kBlockN>(params, tile.m_block);
    if (range.begin == range.end) return;

    auto sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutQ{});         // (BLK_M, D)
    auto sK = make_tensor(make_smem_ptr(smem.keys.k), typename Traits::SmemLayoutKV{});   // (BLK_N, D, stage)
    auto sV = make_tensor(make_smem_ptr(smem.keys.v), typename Traits::SmemLayoutKV{});   // (BLK_N, D, stage)
    auto sVt = make_tensor(make_smem_ptr(smem.keys.v), typename Traits::SmemLayoutVt{});  // (D, BLK_N, stage)
    KeyTileLoader<Traits> k(params, tile, params.k, params.k_strides, range.end - 1);
    KeyTileLoader<Traits> v(params, tile, params.v, params.v_strides, range.end - 1);
    typename Traits::MmaS mma_s;
    typename Traits::MmaO mma_o;

    int const last_keys = params.len_k - (range.end - 1) * kBlockN;
    load_q<Traits>(params, tile, sQ);
    k.load_next(Edge{}, sK(_, _, 0), last_keys);
    if constexpr (kTwoStages) v.load_next(Edge{}, sV(_, _, 0), last_keys);
    cp_async_fence();

    int stage = 0;
    for_each_key_tile_two_kinds<Traits>(params, tile, range, [&](int n, auto kind) __attribute__((always_inline)) {
      cp_async_wait<0>();  // this thread's copies of K(n), and with two stages of V(n), have landed
      __syncthreads();     // those of all threads have; and all have read tile n+1: its buffers are free
      if constexpr (kTwoStages) {
        if (n > first_key_tile<Traits>(params, tile)) {
          k.load_next(Whole{}, sK(_, _, stage ^ 1), kBlockN);
          v.load_next(Whole{}, sV(_, _, stage ^ 1), kBlockN);
        }
      } else {
        v.load_next(kind, sV(_, _, 0), params.len_k - n * kBlockN);
      }
      cp_async_fence();

      auto tSrS = partition_fragment_C(mma_s, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
      clear(tSrS);
      add_product_ss<CopyAtom, CopyAtom>(mma_s, tSrS, sQ, sK(_, _, stage), fresh_thread_index());
      auto scores = rowcol_view(tSrS);  // (rows, columns)
      if constexpr (decltype(kind)::kMasked) mask_scores<Traits>(params, tile, n, mma_s, scores);
      auto cS = make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{});
      // (rows, columns) -> (row, column)
      auto tScS = rowcol_view(mma_s.get_slice(fresh_thread_index()).partition_C(cS));
      auto const wait_keys = [&] {
        if constexpr (!kTwoStages) cp_async_wait<0>();  // this thread's copies of V(n) have landed
      };
      auto const load_keys = [&] {  // those of all threads have; and all have read K(n): its buffer is free
        if constexpr (!kTwoStages) {
          if (n > first_key_tile<Traits>(params, tile)) k.load_next(Whole{}, sK(_, _, 0), kBlockN);
          cp_async_fence();
        }
      };
      exchange_maxima<Traits>(smem, softmax, scores, rowcol_view(tOrO), tScS, wait_keys, load_keys);
      softmax.numerators(scores);
      auto rP = make_tensor_like<Element>(tSrS);  // (MMA, MMA_M, MMA_N)
      convert(tSrS, rP);
      add_product_rs<typename Traits::SmemCopyAtomTransposed>(mma_o, tOrO, as_operand_a(rP), sVt(_, _, stage),
                                                              fresh_thread_index());
      if constexpr (kTwoStages) stage ^= 1;
    });
  }

  // Adds the warps' parts of O to smem.sum, and leaves the rows' sums and offsets. In each round each warp has another
  // part of the tile, so that none waits for another one's addition and the order of additions is fixed.
  template <class Traits, class Softmax, class Accumulator>
  CUTE_DEVICE static void add_up(typename Traits::Storage& smem, Softmax const& softmax,
                                 Accumulator const& tOrO) {  // (MMA, MMA_M, MMA_D)
    constexpr int kWarps = Traits::kWarps, kRowTiles = Traits::kRowTiles;
    constexpr int kPartAtoms = decltype(size<2>(tOrO))::value / Traits::kColumnParts;
    typename Traits::MmaO mma_o;
    auto sSum = make_tensor(make_smem_ptr(smem.sum), typename Traits::SmemLayoutSum{});  // (BLK_M, D)
    auto tOsSum = mma_o.get_slice(threadIdx.x).partition_C(sSum);                        // (MMA, MMA_M, MMA_D)
    auto rows = rowcol_view(mma_o.get_slice(threadIdx.x).partition_C(make_identity_tensor(shape(sSum))));
    CUTE_STATIC_ASSERT_V(size(tOsSum) == size(tOrO));
    int const warp = threadIdx.x / 32;
    if (threadIdx.x % 4 == 0) {
      CUTE_UNROLL
      for (int i = 0; i < size<0>(rows); ++i) {
        int const row = get<0>(rows(i, _0{}));  // (row, column)
        smem.row_parts[row][warp] = softmax.sum[i];
        if (warp == 0) smem.row_offsets[row] = softmax.offset[i];
      }
    }
    for (int round = 0; round < kWarps; ++round) {
      for_each(make_int_sequence<kWarps>{}, [&](auto part) {  // static, so that O stays in registers
        if (part != (warp + round) % kWarps) return;
        CUTE_UNROLL
        for (int d = 0; d < kPartAtoms; ++d) {
          CUTE_UNROLL
          for (int i = 0; i < size<0>(tOrO); ++i) {
            auto& sum = tOsSum(i, part % kRowTiles, part / kRowTiles * kPartAtoms + d);
            float const own = tOrO(i, part % kRowTiles, part / kRowTiles * kPartAtoms + d);
            sum = round == 0 ? own : own + sum;  // own + 0 would be computed before the rounds, and spill
          }
        }
      });
      __syncthreads();  // the additions of this round are visible
    }
  }
};

}  // namespace flash_cute::studies::schedules
