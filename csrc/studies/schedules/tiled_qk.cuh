// tiled_qk: Q and K come in column tiles, through a ring of buffers; V comes whole, a column tile with each of theirs.
// O stays in registers.
//
// A key tile's steps are its column tiles c. At step c: wait for Q_c and K_c; barrier; start loading the column tile
// that is kStages - 1 steps ahead, and V_c; S += Q_c K_c^T. Then softmax, a barrier, and O += P V.
#pragma once

#include "tiled.cuh"

namespace flash_cute::studies::schedules {

struct TiledQk {
  template <class Traits>
  CUTE_DEVICE static void compute_tile(FwdParams const& params, RowTileCoord const& tile, int part,
                                       typename Traits::Storage& smem) {
    typename Traits::Mma mma;
    auto tOrO = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});
    clear(tOrO);  // (MMA, MMA_M, MMA_D)
    OnlineSoftmax<2 * decltype(size<1>(tOrO))::value> softmax(params.scale_log2, params.power_scale);
    mainloop<Traits>(params, tile, smem, softmax, tOrO);
    tiled_epilogue<Traits>(params, tile, part, smem, softmax, tOrO);
  }

 private:
  template <class Traits, class Softmax, class Accumulator>
  CUTE_DEVICE static void mainloop(FwdParams const& params, RowTileCoord const& tile, typename Traits::Storage& smem,
                                   Softmax& softmax,
                                   Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kTiles = Traits::kTiles;
    constexpr int kStages = Traits::kStages, kAhead = Traits::kAhead;
    using CopyAtom = typename Traits::SmemCopyAtom;
    TileRange const range = key_range<kBlockM, kBlockN>(params, tile.m_block);
    if (range.begin == range.end) return;

    auto sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutQ{});    // (BLK_M, columns, stage)
    auto sK = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemLayoutKV{});   // (BLK_N, columns, stage)
    auto sV = make_tensor(make_smem_ptr(smem.v), typename Traits::template SmemLayoutV<kTiles>{});
    auto sVt = make_tensor(make_smem_ptr(smem.v), typename Traits::template SmemLayoutVt<kTiles>{});
    typename Traits::Mma mma;

    auto const load = [&](int n, int c, int stage, auto kind) __attribute__((always_inline)) {
      q_columns<Traits>(params, tile).load(c, sQ(_, _, stage));
      key_columns<Traits>(params, tile, params.k, params.k_strides, n, kind).load(c, sK(_, _, stage));
    };
    CUTE_UNROLL
    for (int c = 0; c < kAhead; ++c) {
      load(range.end - 1, c, c, Edge{});
      cp_async_fence();
    }

    for_each_key_tile_two_kinds<Traits>(params, tile, range, [&](int n, auto kind) __attribute__((always_inline)) {
      auto tSrS = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
      clear(tSrS);
      auto const add_column_tile = [&](int c, int stage) __attribute__((always_inline)) {
        cp_async_wait<kAhead - 1>();  // this thread's copies of Q_c and K_c have landed
        // Those of all threads have; and all have finished the step before: its buffers are free, and, at c = 0, V's.
        __syncthreads();
        int const load_stage = (stage + kAhead) % kStages;
        if (c + kAhead < kTiles) {
          load(n, c + kAhead, load_stage, kind);
        } else if (n > first_key_tile<Traits>(params, tile)) {
          load(n - 1, c + kAhead - kTiles, load_stage, Whole{});
        }
        key_columns<Traits>(params, tile, params.v, params.v_strides, n, kind).load(c, sV(_, _, c));
        cp_async_fence();
        add_product_ss<CopyAtom, CopyAtom>(mma, tSrS, sQ(_, _, stage), sK(_, _, stage), fresh_thread_index());
      };
      CUTE_NO_UNROLL
      for (int first = 0; first < kTiles; first += kStages) {
        CUTE_UNROLL
        for (int stage = 0; stage < kStages; ++stage) add_column_tile(first + stage, stage);
      }
      auto rP = make_numerators<Traits>(params, tile, n, kind, mma, softmax, tSrS, tOrO);  // (MMA, MMA_M, MMA_N)
      auto const tOrP = as_operand_a(rP);                                                  // (MMA, MMA_M, MMA_K)
      cp_async_wait<0>();  // this thread's copies of V(n) have landed
      __syncthreads();     // those of all threads have
      CUTE_UNROLL
      for (int c = 0; c < kTiles; ++c) {
        add_product_rs<typename Traits::SmemCopyAtomTransposed>(mma, column_tile<kTiles>(tOrO, c), tOrP, sVt(_, _, c),
                                                                fresh_thread_index());
      }
    });
    softmax.template finish<typename Traits::Element>();
  }
};

}  // namespace flash_cute::studies::schedules
