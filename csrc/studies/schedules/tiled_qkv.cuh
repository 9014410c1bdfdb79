// tiled_qkv: Q, K and V come in column tiles through one ring of buffers, so that shared memory does not grow with the
// head dim. O stays in registers, at most 256 columns of it per CTA: at head dim 512 two CTAs compute S of the same
// rows, each for its columns of O.
//
// A key tile's steps are the column tiles of Q and K, then those of V. At each: wait for its copies; barrier; start
// loading the column tile that is kStages - 1 steps ahead; S += Q_c K_c^T or O_c += P V_c. Softmax is between the two.
#pragma once

#include "tiled.cuh"

namespace flash_cute::studies::schedules {

struct TiledQkv {
  template <class Traits>
  CUTE_DEVICE static void compute_tile(FwdParams const& params, RowTileCoord const& tile, int part,
                                       typename Traits::Storage& smem) {
    typename Traits::Mma mma;
    auto tOrO = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kOutColumns>>{});
    clear(tOrO);  // (MMA, MMA_M, MMA_D)
    OnlineSoftmax<2 * decltype(size<1>(tOrO))::value> softmax(params.scale_log2, params.power_scale);
    mainloop<Traits>(params, tile, part, smem, softmax, tOrO);
    tiled_epilogue<Traits>(params, tile, part, smem, softmax, tOrO);
  }

 private:
  template <class Traits, class Softmax, class Accumulator>
  CUTE_DEVICE static void mainloop(FwdParams const& params, RowTileCoord const& tile, int part,
                                   typename Traits::Storage& smem, Softmax& softmax,
                                   Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    constexpr int kTiles = Traits::kTiles, kOutTiles = Traits::kOutTiles;
    constexpr int kStages = Traits::kStages, kAhead = Traits::kAhead;
    using CopyAtom = typename Traits::SmemCopyAtom;
    TileRange const range = key_range<kBlockM, kBlockN>(params, tile.m_block);
    if (range.begin == range.end) return;

    auto sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutQ{});     // (BLK_M, columns, stage)
    auto sK = make_tensor(make_smem_ptr(smem.kv), typename Traits::SmemLayoutKV{});   // (BLK_N, columns, stage)
    auto sVt = make_tensor(make_smem_ptr(smem.kv), typename Traits::template SmemLayoutVt<kStages>{});
    typename Traits::Mma mma;

    // Column tile c of Q and K; from kTiles on, c - kTiles of V.
    auto const load = [&](int n, int c, int stage, auto kind) __attribute__((always_inline)) {
      if (c < kTiles) {
        q_columns<Traits>(params, tile).load(c, sQ(_, _, stage));
        key_columns<Traits>(params, tile, params.k, params.k_strides, n, kind).load(c, sK(_, _, stage));
      } else {
        int const v_tile = part * kOutTiles + c - kTiles;
        key_columns<Traits>(params, tile, params.v, params.v_strides, n, kind).load(v_tile, sK(_, _, stage));
      }
    };
    CUTE_UNROLL
    for (int c = 0; c < kAhead; ++c) {
      load(range.end - 1, c, c, Edge{});
      cp_async_fence();
    }

    for_each_key_tile_two_kinds<Traits>(params, tile, range, [&](int n, auto kind) __attribute__((always_inline)) {
      auto const begin_step = [&](int c, int stage) __attribute__((always_inline)) {
        cp_async_wait<kAhead - 1>();  // this thread's copies of column tile c have landed
        __syncthreads();  // those of all threads have; and all have finished the step before: its buffers are free
        int const load_stage = (stage + kAhead) % kStages;
        if (c + kAhead < kTiles + kOutTiles) {
          load(n, c + kAhead, load_stage, kind);
        } else if (n > first_key_tile<Traits>(params, tile)) {
          load(n - 1, c + kAhead - kTiles - kOutTiles, load_stage, Whole{});
        }
        cp_async_fence();
      };
      auto tSrS = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
      clear(tSrS);
      CUTE_NO_UNROLL
      for (int first = 0; first < kTiles; first += kStages) {
        CUTE_UNROLL
        for (int stage = 0; stage < kStages; ++stage) {
          begin_step(first + stage, stage);
          add_product_ss<CopyAtom, CopyAtom>(mma, tSrS, sQ(_, _, stage), sK(_, _, stage), fresh_thread_index());
        }
      }
      auto rP = make_numerators<Traits>(params, tile, n, kind, mma, softmax, tSrS, tOrO);  // (MMA, MMA_M, MMA_N)
      auto const tOrP = as_operand_a(rP);                                                  // (MMA, MMA_M, MMA_K)
      CUTE_UNROLL
      for (int c = 0; c < kOutTiles; ++c) {
        int const stage = c % kStages;
        begin_step(kTiles + c, stage);
        add_product_rs<typename Traits::SmemCopyAtomTransposed>(mma, column_tile<kOutTiles>(tOrO, c), tOrP,
                                                                sVt(_, _, stage), fresh_thread_index());
      }
    });
    softmax.template finish<typename Traits::Element>();
  }
};

}  // namespace flash_cute::studies::schedules
