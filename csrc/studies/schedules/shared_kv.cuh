// shared_kv: K and V of a tile take turns in one buffer, half the shared memory of split_q's one stage. V is loaded
// while softmax runs; nothing in the CTA covers the load of K, only the SM's other CTAs do. Warps own rows.
//
// A step has four barriers: K(n) has landed; all have read K(n); V(n) has landed; all have read V(n).
#pragma once

#include "sm80/forward/rows/epilogue.cuh"
#include "pieces.cuh"

namespace flash_cute::studies::schedules {

struct SharedKv {
  template <class Traits>
  CUTE_DEVICE static void compute_tile(FwdParams const& params, RowTileCoord const& tile, int /*part*/,
                                       typename Traits::Storage& smem) {
    typename Traits::Mma mma;
    auto tOrO = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});
    clear(tOrO);  // (MMA, MMA_M, MMA_D)
    OnlineSoftmax<2 * decltype(size<1>(tOrO))::value> softmax(params.scale_log2, params.power_scale);
    mainloop<Traits>(params, tile, smem, softmax, tOrO);
    rows::epilogue<Traits>(params, params, tile, smem, softmax, tOrO);
  }

 private:
  template <class Traits, class Softmax, class Accumulator>
  CUTE_DEVICE static void mainloop(FwdParams const& params, RowTileCoord const& tile, typename Traits::Storage& smem,
                                   Softmax& softmax,
                                   Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    constexpr bool kQInRegs = Traits::kTile.q_in_regs;
    using CopyAtom = typename Traits::SmemCopyAtom;
    TileRange const range = key_range<kBlockM, kBlockN>(params, tile.m_block);
    if (range.begin == range.end) return;

    auto sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutQ{});                   // (BLK_M, D)
    auto sK = make_tensor(make_smem_ptr(smem.kv), typename Traits::SmemLayoutKV{})(_, _, _0{});     // (BLK_N, D)
    auto sVt = make_tensor(make_smem_ptr(smem.kv), typename Traits::SmemLayoutVt{})(_, _, _0{});    // (D, BLK_N)
    KeyTileLoader<Traits> k(params, tile, params.k, params.k_strides, range.end - 1);
    KeyTileLoader<Traits> v(params, tile, params.v, params.v_strides, range.end - 1);
    typename Traits::Mma mma;

    load_q<Traits>(params, tile, sQ);
    cp_async_fence();
    k.load_next(Edge{}, sK, params.len_k - (range.end - 1) * kBlockN);
    cp_async_fence();
    auto tSrQ = fragment_a<typename Traits::Element>(mma, shape(sQ));  // (MMA, MMA_M, MMA_D), if kept
    if constexpr (kQInRegs) {
      cp_async_wait<1>();  // this thread's copies of Q have landed
      __syncthreads();     // those of all threads have
      copy(read_operand_a<CopyAtom>(mma, sQ), tSrQ);
    }

    for_each_key_tile<Traits>(params, tile, range, [&](int n, auto kind) __attribute__((always_inline)) {
      cp_async_wait<0>();  // this thread's copies of K(n) have landed
      __syncthreads();     // those of all threads have
      auto tSrS = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
      clear(tSrS);
      if constexpr (kQInRegs) {
        add_product_rs<CopyAtom>(mma, tSrS, tSrQ, sK, threadIdx.x);
      } else {
        add_product_ss<CopyAtom, CopyAtom>(mma, tSrS, sQ, sK, threadIdx.x);
      }

      __syncthreads();  // all have read K(n): V(n) may overwrite it
      v.load_next(kind, sK, params.len_k - n * kBlockN);
      cp_async_fence();
      auto rP = make_numerators<Traits>(params, tile, n, kind, mma, softmax, tSrS, tOrO);  // (MMA, MMA_M, MMA_N)

      cp_async_wait<0>();  // this thread's copies of V(n) have landed
      __syncthreads();     // those of all threads have
      add_product_rs<typename Traits::SmemCopyAtomTransposed>(mma, tOrO, as_operand_a(rP), sVt, threadIdx.x);

      if (n > first_key_tile<Traits>(params, tile)) {
        __syncthreads();  // all have read V(n): K(n-1) may overwrite it
        k.load_next(Whole{}, sK, kBlockN);
        cp_async_fence();
      }
    });
    softmax.template finish<typename Traits::Element>();
  }
};

}  // namespace flash_cute::studies::schedules
