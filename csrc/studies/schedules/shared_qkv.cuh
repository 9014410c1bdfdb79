// shared_qkv: one buffer. Q passes through it to registers, where it stays; then its halves are K's and V's buffers,
// and a step is split_q's with one stage: V(n) is in flight during S = Q K(n), K(n-1) during softmax and O += P V(n).
// In the end O passes through it. Warps own rows. The price is Q's registers.
#pragma once

#include "sm80/forward/rows/epilogue.cuh"
#include "pieces.cuh"

namespace flash_cute::studies::schedules {

struct SharedQkv {
  template <class Traits>
  CUTE_DEVICE static void compute_tile(FwdParams const& params, RowTileCoord const& tile, int /*part*/,
                                       typename Traits::Storage& smem) {
    typename Traits::Mma mma;
    auto tOrO = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});
    clear(tOrO);  // (MMA, MMA_M, MMA_D)
    OnlineSoftmax<2 * decltype(size<1>(tOrO))::value> softmax(params.scale_log2, params.power_scale);
    mainloop<Traits>(params, tile, smem, softmax, tOrO);
    __syncthreads();  // all have read V(begin), which O overwrites
    // The coordinates are computed again: kept during the loop, they spilled at head dim 128.
    rows::epilogue<Traits>(params, params, params.order.coord(fresh_block_index()), smem, softmax, tOrO);
  }

 private:
  template <class Traits, class Softmax, class Accumulator>
  CUTE_DEVICE static void mainloop(FwdParams const& params, RowTileCoord const& tile, typename Traits::Storage& smem,
                                   Softmax& softmax,
                                   Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    using CopyAtom = typename Traits::SmemCopyAtom;
    TileRange const range = key_range<kBlockM, kBlockN>(params, tile.m_block);
    if (range.begin == range.end) return;

    auto* const v_begin = smem.q + Traits::kKeyElements;
    auto sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutQ{});                 // (BLK_M, D)
    auto sK = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutKV{})(_, _, _0{});    // (BLK_N, D)
    auto sV = make_tensor(make_smem_ptr(v_begin), typename Traits::SmemLayoutKV{})(_, _, _0{});   // (BLK_N, D)
    auto sVt = make_tensor(make_smem_ptr(v_begin), typename Traits::SmemLayoutVt{})(_, _, _0{});  // (D, BLK_N)
    KeyTileLoader<Traits> k(params, tile, params.k, params.k_strides, range.end - 1);
    KeyTileLoader<Traits> v(params, tile, params.v, params.v_strides, range.end - 1);
    typename Traits::Mma mma;
    auto const thread = [] {  // with 168 registers per thread, addresses that are kept spill
      return Traits::kTile.ctas_per_sm > 2 ? fresh_thread_index() : int(threadIdx.x);
    };

    load_q<Traits>(params, tile, sQ);
    cp_async_fence();
    cp_async_wait<0>();  // this thread's copies of Q have landed
    __syncthreads();     // those of all threads have
    auto tSrQ = read_operand_a<CopyAtom>(mma, sQ);  // (MMA, MMA_M, MMA_D)
    __syncthreads();     // all have read Q: K and V may overwrite it
    k.load_next(Edge{}, sK, params.len_k - (range.end - 1) * kBlockN);
    cp_async_fence();

    for_each_key_tile<Traits>(params, tile, range, [&](int n, auto kind) __attribute__((always_inline)) {
      cp_async_wait<0>();  // this thread's copies of K(n) have landed
      __syncthreads();     // those of all threads have; and all have read V(n+1): V(n) may overwrite it
      v.load_next(kind, sV, params.len_k - n * kBlockN);
      cp_async_fence();
      auto tSrS = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
      clear(tSrS);
      add_product_rs<CopyAtom>(mma, tSrS, tSrQ, sK, thread());

      cp_async_wait<0>();  // this thread's copies of V(n) have landed
      __syncthreads();     // those of all threads have; and all have read K(n): K(n-1) may overwrite it
      if (n > first_key_tile<Traits>(params, tile)) k.load_next(Whole{}, sK, kBlockN);
      cp_async_fence();
      auto rP = make_numerators<Traits>(params, tile, n, kind, mma, softmax, tSrS, tOrO);  // (MMA, MMA_M, MMA_N)
      add_product_rs<typename Traits::SmemCopyAtomTransposed>(mma, tOrO, as_operand_a(rP), sVt, thread());
    });
    softmax.template finish<typename Traits::Element>();
  }
};

}  // namespace flash_cute::studies::schedules
