// The consumer's loop over the chunks of a row tile, from the first to the last, and over the key tiles of each, from
// the last to the first. The steps are those of sm90/forward/rows/mainloop.cuh: S of a key tile is issued before the
// product P V of the tile before. That holds from chunk to chunk too, so that the tensor cores have work while a chunk
// is folded:
//
//     tensor cores | first S of a chunk | O += P V of the chunk before |   other warpgroups' GEMMs    | next S | ...
//     warpgroup    |                    |                              | fold O, softmax restarts, P  |        | ...
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "core/mask.cuh"
#include "core/registers.cuh"
#include "core/softmax.cuh"
#include "fold.cuh"
#include "sm90/common/warpgroup.cuh"
#include "sm90/forward/common/warpgroup_keys.cuh"

namespace flash_cute::sm90::decode::key_chunks {

// Computes a warpgroup's rows of a row tile: the chunks from that of `keys`, which has been read, to the CTA's last one
// of the tile; where the fold is in global memory, that one alone. `tile_number` is then of the last one, which is not
// released, and with kReadsNext `keys` of the one behind it. Leaves the sum of these chunks and of all before in tOrO
// and softmax.
//
// A long function, as the forward's is, and for the same reason.
template <class Traits, class Accumulator>
CUTE_DEVICE void mainloop(Params const& params, int& tile_number, int warpgroup, typename Traits::SharedStorage& smem,
                          forward::WarpgroupKeys<Traits>& keys, OnlineSoftmax<2>& softmax,
                          Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  using Turn = TurnRing<Traits::kWarpgroups, Traits::kTile.ping_pong>;
  using Softmax = OnlineSoftmax<2>;
  constexpr int kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr bool kFolds = Traits::kChunks == Chunks::kOfOneCta;

  auto tile = [&]() -> Tile const& { return smem.tile[opaque(tile_number) & 1]; };
  auto q_state = [&] { return query_state<Traits>(tile()); };
  auto sQ = make_tensor(make_smem_ptr(smem.queries(uniform(q_state().stage), warpgroup)),
                        typename Traits::SmemLayoutQ{});                              // (64, D)
  auto sK = make_tensor(make_smem_ptr(smem.k[0]), typename Traits::SmemLayoutK{});    // (BLK_N, D, stage)
  auto sVt = make_tensor(make_smem_ptr(smem.v[0]), typename Traits::SmemLayoutVt{});  // (D, BLK_N, stage)

  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  auto const thread_qk = mma_qk.get_slice(0);  // descriptors are the same for all threads
  auto const thread_pv = mma_pv.get_slice(0);
  auto tSrQ = thread_qk.partition_fragment_A(sQ);   // (MMA, MMA_M, MMA_D)
  auto tSrK = thread_qk.partition_fragment_B(sK);   // (MMA, MMA_N, MMA_D, stage)
  auto tOrV = thread_pv.partition_fragment_B(sVt);  // (MMA, MMA_D, MMA_N, stage)
  auto tSrS = partition_fragment_C(mma_qk, Shape<Int<kRows>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
  auto rP = make_tensor_like<Element>(tSrS);                                     // (MMA, MMA_M, MMA_N)
  auto tOrP = make_tensor(rP.data(), operand_a_layout_64(rP.layout()));       // (MMA, MMA_M, MMA_K)
  auto scores = rowcol_view(tSrS);                                               // (rows, columns)
  auto acc = rowcol_view(tOrO);                                                  // (rows, head dim)
  auto cS = make_identity_tensor(Shape<Int<kRows>, Int<kBlockN>>{});
  auto tScS_0 = rowcol_view(mma_qk.get_slice(_0{}).partition_C(cS));  // (rows, columns) -> (row, column) of thread 0

  PipelineState<Traits::kStages> k_state = at_use<Traits::kStages>(keys.count), v_state = k_state;
  auto issue_qk = [&] { issue_gemm<Accumulate::kOverwrite>(mma_qk, tSrQ, tSrK(_, _, _, k_state.stage), tSrS); };
  auto issue_pv = [&] { issue_gemm<Accumulate::kAdd>(mma_pv, tOrP, tOrV(_, _, _, v_state.stage), tOrO); };
  auto wait_product = [&] {
    warpgroup_wait<0>();
    warpgroup_fence_operand(tOrO);
  };
  auto release_k = [&] {
    smem.k_pipeline.release(k_state);
    k_state.advance();
  };
  auto release_v = [&] {
    smem.v_pipeline.release(v_state);
    v_state.advance();
  };
  auto finish_product = [&] {
    smem.v_pipeline.wait_full(v_state);
    issue_pv();
    wait_product();
    release_v();
  };
  // S(n), and the product of the key tile before.
  auto issue_step = [&] {
    smem.k_pipeline.wait_full(k_state);
    Turn::take(warpgroup);  // the warpgroup before has issued its GEMMs
    issue_qk();
    smem.v_pipeline.wait_full(v_state);
    issue_pv();
    Turn::hand_on(warpgroup);
    warpgroup_wait<1>();  // S(n)
    warpgroup_fence_operand(tSrS);
    release_k();
  };
  auto finish_scores = [&](auto&& mask, auto& rescaled, auto wait, auto release) __attribute__((always_inline)) {
    mask();
    softmax.update_max(scores, rescaled, wait, release);
    softmax.numerators(scores);
    convert(tSrS, rP);
  };
  auto step = [&](auto&& mask) __attribute__((always_inline)) {
    issue_step();
    finish_scores(mask, acc, wait_product, release_v);
  };
  int offset;  // the key tile's: the tile's first row minus its first column
  auto mask = [&](int columns) __attribute__((always_inline)) {
    auto tScS = rowcol_view(mma_qk.get_slice(fresh_thread_index() % 128).partition_C(cS));
    apply_mask(scores, tScS, tScS_0, tile(), offset, columns);
  };
  auto mask_at_edge = [&](int n, int columns) __attribute__((always_inline)) {
    forward::mask_at_edge(params, smem.tile[0], keys, n, offset, columns, mask);
  };
  // Key tiles of the CTA that this warpgroup does not see. Each warpgroup takes a turn for each key tile, but for the
  // first one of a row tile.
  auto pass_on = [&](int count, int turns) {
#pragma unroll 1
    for (; count > 0; --count) {
      smem.k_pipeline.wait_full(k_state);
      __syncwarp();  // all lanes have waited
      release_k();
      smem.v_pipeline.wait_full(v_state);
      __syncwarp();
      release_v();
      if (--turns < 0) continue;
      Turn::take(warpgroup);
      Turn::hand_on(warpgroup);
    }
  };

  constexpr bool kGoesOn = Traits::kSmem.has_fold;
  OwnFold<Traits> own(params, smem, warpgroup);
  bool const from_other = uniform(tile().fold) & kFromOther;
  bool has_fold = (uniform(tile().fold) & (kContinues | kFromOther)) == kContinues;
  auto take_handed_fold = [&] {
    if (has_fold || !from_other) return;
    take_fold<Traits>(Folds<Traits>{params.parts}, warpgroup, own);
    has_fold = true;
  };
  // The chunk in the registers is complete; the next one begins from nothing.
  auto fold_chunk = [&]() __attribute__((always_inline)) {
    softmax.template finish<Element>();
    take_handed_fold();
    if (has_fold) {
      add_to_fold</*kStore=*/true>(own, softmax, tOrO);
    } else {
      begin_fold(own, softmax, tOrO);
    }
    has_fold = true;
    softmax = Softmax(params.scale_log2, params.power_scale);
    clear(tOrO);
  };

  clear(tOrO);
  smem.q_pipeline[warpgroup].wait_full(q_state());  // TMA: the warpgroup's rows of Q have landed
  bool is_open = false;     // the registers have a chunk that is in no fold yet
  bool is_pending = false;  // its last product is not issued yet
#pragma unroll 1
  while (true) {
    int const fold = uniform(tile().fold), count = keys.end - keys.begin;
    bool const goes_on = is_pending && count > 0 && keys.after == 0;  // without a gap
    if (is_pending && !goes_on) finish_product();
    is_pending = false;
    if (count == 0) {
      int const all = keys.before + keys.after;
      pass_on(all, is_first(fold) ? all - 1 : all);
      __syncwarp();  // all lanes have waited for Q
    } else {
      pass_on(keys.after, keys.after);
      if (goes_on) {
        issue_step();
        wait_product();
        release_v();
      } else {
        smem.k_pipeline.wait_full(k_state);
        if (!is_first(fold)) Turn::take(warpgroup);
        issue_qk();
        if (!is_first(fold)) Turn::hand_on(warpgroup);
        warpgroup_wait<0>();
        warpgroup_fence_operand(tSrS);
        release_k();
      }
      if constexpr (kFolds && kGoesOn) {
        if (is_open) fold_chunk();
      }
      Sequence const sequence = forward::uniform_lengths_of(params, tile());
      offset = keys.first_row - (keys.end - 1) * kBlockN;
      Softmax::NoAccumulator none;  // acc is 0
      finish_scores([&] { mask_at_edge(keys.end - 1, sequence.len_k - (keys.end - 1) * kBlockN); }, none, [] {},
                    [] {});
      int left = count - 1;  // key tiles after this one
      if (kHeadDim <= 128 && !sequence.band.has_lower()) {
        for (int const whole = keys.whole_end - keys.begin; left > whole; --left) {
          offset += kBlockN;
          step([&] { mask(kBlockN); });
        }
        for (; left > 0; --left) step([] {});
      }
      for (; left > 0; --left) {
        offset += kBlockN;
        step([&] { mask_at_edge(keys.begin + left - 1, kBlockN); });
      }
      is_open = is_pending = true;
    }
    bool const last = is_last(fold);
    if (last) smem.q_pipeline[warpgroup].release(q_state());  // all S have been computed: the next Q may be loaded
    if (!kGoesOn || last) break;
    if (is_pending && keys.before > 0) {
      finish_product();
      is_pending = false;
      pass_on(keys.before, keys.before);
    }
    __syncwarp();  // all lanes have read the tile
    smem.tile_pipeline.release(at_step(tile_number));
    keys.read(params, smem, ++tile_number, warpgroup);
  }
  // What the next tile needs is read under the last product, unless the producers wait for this warpgroup to pass on
  // what is left of this one.
  auto const read_next = [&] {
    if constexpr (Traits::kReadsNext) keys.read(params, smem, tile_number + 1, warpgroup);
  };
  if (is_pending) {
    int const before = keys.before;
    smem.v_pipeline.wait_full(v_state);
    issue_pv();
    softmax.template finish<Element>();
    if (before == 0) read_next();
    wait_product();
    release_v();
    if (before > 0) {
      pass_on(before, before);
      read_next();
    }
  } else {
    if (is_open) softmax.template finish<Element>();
    read_next();
  }
  if constexpr (kFolds) {
    take_handed_fold();
    if (has_fold) add_to_fold</*kStore=*/false>(own, softmax, tOrO);
    own.wait_for_all_threads();  // the results pass through the fold's memory
  }
}

}  // namespace flash_cute::sm90::decode::key_chunks
