// The consumer's loop over the key tiles that its row tile visits, from the last to the first. A step is that of
// rows/mainloop.cuh; what a key tile is to the warpgroup comes with it:
//
//     whole         a step
//     sees some     a step with the mask: intervals are in shared memory, bits are read while S is computed
//     sees nothing  the warpgroup hands on its turn and releases K and V
//
// The first step after such a tile, or of a row tile, has no product of a tile before. The last step before such a tile
// is followed by its own product.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/bits_mask.cuh"
#include "core/interval_mask.cuh"
#include "core/layout.cuh"
#include "core/registers.cuh"
#include "core/score.cuh"
#include "core/softmax.cuh"
#include "sm90/common/warpgroup.cuh"
#include "sm90/forward/common/scheduler.cuh"
#include "sm90/forward/common/scores.cuh"
#include "sm90/forward/rows/capped_scores.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::masked_rows {

// What a modified score reads of a tile's place.
struct Positions {
  int shift;
  Band band;
};

// What a warpgroup needs to know of a row tile.
struct WarpgroupTile {
  bool exists;
  uint32_t first_flags;  // of its first key tile; 0: it visits none
  int m_block;
  int count;  // of the key tiles that the CTA has loaded before

  // Waits for the tile.
  template <class SharedStorage>
  CUTE_DEVICE void read(SharedStorage& smem, int tile_number) {
    smem.tile_pipeline.wait_full(at_step(tile_number));  // the producer has written the tile
    TileCoord const volatile& tile = smem.tile[tile_number & 1];
    m_block = uniform(tile.m_block);
    first_flags = uniform(tile.keys.end);
    count = uniform(tile.keys.count);
    exists = m_block >= 0;
  }
};

// Computes one warpgroup's rows of the CTA's tile. Leaves the unnormalized O in tOrO and the row statistics in softmax;
// releases Q.
template <class Traits, class Accumulator>
CUTE_DEVICE void mainloop(FwdParams const& params, int tile_number, int warpgroup, typename Traits::SharedStorage& smem,
                          WarpgroupTile const& tile, OnlineSoftmax<2>& softmax,
                          Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  using Turn = TurnRing<Traits::kWarpgroups, Traits::kTile.ping_pong>;
  constexpr int kRows = Traits::kRows, kBlockN = Traits::kBlockN;

  // Opaque: else ptxas rematerialises Q's descriptors in each step.
  auto q_state = [&] { return Traits::q_state(opaque(tile_number)); };
  auto sQ = make_tensor(make_smem_ptr(smem.q[q_state().stage][warpgroup]), typename Traits::SmemLayoutQ{});  // (64, D)
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

  PipelineState<Traits::kStages> k_state = at_use<Traits::kStages>(tile.count), v_state = k_state;
  auto issue_qk = [&] {
    if constexpr (Traits::kComputesDescriptors) {
      static_assert(Traits::kSmem.q_stages == 1);
      auto sQ_again = make_tensor(make_smem_ptr(smem.q[0][opaque(warpgroup)]), typename Traits::SmemLayoutQ{});
      auto tSrQ_again = thread_qk.partition_fragment_A(sQ_again);  // (MMA, MMA_M, MMA_D)
      issue_gemm<Accumulate::kOverwrite>(mma_qk, tSrQ_again, tSrK(_, _, _, k_state.stage), tSrS);
    } else {
      issue_gemm<Accumulate::kOverwrite>(mma_qk, tSrQ, tSrK(_, _, _, k_state.stage), tSrS);
    }
  };
  auto issue_pv = [&] {
    smem.v_pipeline.wait_full(v_state);  // TMA: V of the key tile before has landed
    issue_gemm<Accumulate::kAdd>(mma_pv, tOrP, tOrV(_, _, _, v_state.stage), tOrO);
  };
  auto release_k = [&] {
    smem.k_pipeline.release(k_state);
    k_state.advance();
  };
  auto release_v = [&] {
    smem.v_pipeline.release(v_state);
    v_state.advance();
  };
  auto finish_pv = [&] {
    warpgroup_wait<0>();
    warpgroup_fence_operand(tOrO);
    release_v();
  };

  int const first_row = tile.m_block * Traits::kBlockM + warpgroup * kRows;
  using Modifier = ScoresOf<Traits::kVariant.modifies_scores, kRows, kBlockN>;
  Modifier modify;
  modify.begin(params, smem.tile[opaque(tile_number) & 1],
               Positions{.shift = params.sequences.shift, .band = {.lower = -kNoLimit, .upper = kNoLimit}},
               [&] { return rowcol_view(mma_qk.get_slice(threadIdx.x % 128).partition_C(cS)); });

  // Where the mask is by bits, those of the warp's rows and the key tile.
  WarpBits<kBlockN> bits;
  auto read_bits = [&] {
    int const thread = fresh_thread_index();  // before the test, which ptxas else makes part of the caller's
    if (params.mask.bits == nullptr) return;
    KeySlot const volatile& slot = smem.slots[k_state.stage];
    bits.read(slot.bits + warpgroup * params.mask.bits_block_stride, thread / 32 % 4 * 16, thread % 32);
  };
  // Hides what the mask hides.
  auto mask = [&] {
    if (params.mask.bits != nullptr) {
      if constexpr (Traits::kSavesRegisters) read_bits();
      bits.hide(scores, tScS_0, 0, fresh_thread_index() % 32);
      return;
    }
    // (rows, columns) -> (row, column)
    auto tScS = rowcol_view(mma_qk.get_slice(fresh_thread_index() % 128).partition_C(cS));
    apply_interval_mask<kBlockN>(scores, tScS, tScS_0, first_row, smem.intervals[k_state.stage][0],
                                 params.mask.intervals_per_column);
    __syncwarp();  // all lanes have read them
  };
  // Turns S(n) into P(n), releases K, and rescales the accumulator if the maximum changes.
  [[maybe_unused]] rows::CappedScores<decltype(scores)> capped{softmax, scores, params.score};
  auto finish_scores = [&](bool whole, auto const& offset, auto wait_product,
                           auto release) __attribute__((always_inline)) {
    if constexpr (Traits::kFoldsSoftcap) {
      static_assert(!Traits::kTile.late_wait);
      if (params.score.softcap_scale != 0.f && params.score.slopes == nullptr) {
        if (whole) {
          release_k();
          capped.finish(rows::NoMask{}, acc, wait_product, release);
        } else {
          auto const mask_and_release = [&] {
            mask();
            release_k();
          };
          capped.finish(mask_and_release, acc, wait_product, release);
        }
        convert(tSrS, rP);
        return;
      }
    }
    typename Modifier::Shift shift;
    modify(params, scores, tScS_0, offset(), shift);
    // One place releases K: with one in each branch ptxas takes them for divergent, and has barriers around them.
    if (Traits::kSavesRegisters && whole) {
      release_k();
    } else {
      if (!whole) mask();
      release_k();
    }
    softmax.update_max<Traits::kTile.late_wait>(scores, acc, wait_product, release, shift);
    softmax.numerators(scores, shift);
    convert(tSrS, rP);  // no branch in between, so that conversions overlap with the exponentials
  };

  uint32_t slot_word;  // see KeySlot
  // After the GEMMs have been issued, before K is released.
  auto read_slot = [&] {
    KeySlot const volatile& slot = smem.slots[k_state.stage];
    slot_word = uniform(slot.word);
  };
  // The tile's first row minus its first column.
  auto offset = [&] { return first_row - KeySlot::number(slot_word) * kBlockN; };
  // One place issues S and the product, for whole key tiles and others: ptxas keeps S's descriptors then.
  auto step = [&](bool whole) __attribute__((always_inline)) {
    Turn::take(warpgroup);  // the warpgroup before has issued its GEMMs
    issue_qk();
    issue_pv();  // of the key tile before
    Turn::hand_on(warpgroup);
    if (!Traits::kSavesRegisters && !whole) read_bits();  // under S
    read_slot();
    warpgroup_wait<1>();  // S(n)
    warpgroup_fence_operand(tSrS);
    finish_scores(
        whole, offset,
        [&] {
          warpgroup_wait<0>();
          warpgroup_fence_operand(tOrO);
        },
        release_v);
  };
  // The same where no product is due.
  auto first_step = [&](bool whole) {
    Turn::take(warpgroup);
    issue_qk();
    Turn::hand_on(warpgroup);
    if (!Traits::kSavesRegisters && !whole) read_bits();  // under S
    read_slot();
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrS);
    finish_scores(whole, offset, [] {}, [] {});
  };
  auto pass_on = [&] {
    read_slot();  // by all lanes
    release_k();
    Turn::take(warpgroup);
    Turn::hand_on(warpgroup);
    smem.v_pipeline.wait_full(v_state);
    __syncwarp();  // all lanes have waited
    release_v();
  };

  clear(tOrO);
  smem.q_pipeline[warpgroup].wait_full(q_state());  // TMA: the warpgroup's rows of Q have landed
  auto is_whole = [](uint32_t own) { return (own & KeyFlags::kWhole) != 0; };
  bool due = false;  // O += P V of the last key tile
  uint32_t flags = tile.first_flags;
  while (flags != 0) {
    smem.k_pipeline.wait_full(k_state);  // TMA: K(n) has landed, and with it its slot
    uint32_t own = KeyFlags::of(flags, warpgroup);
    if (own == 0) {
      pass_on();
      flags = KeySlot::flags(slot_word);
      continue;
    }
    // Key tiles one behind the other that the warpgroup sees.
    first_step(is_whole(own));
    flags = KeySlot::flags(slot_word);
    own = KeyFlags::of(flags, warpgroup);
    CUTE_NO_UNROLL
    while (own != 0) {
      smem.k_pipeline.wait_full(k_state);
      step(is_whole(own));
      flags = KeySlot::flags(slot_word);
      own = KeyFlags::of(flags, warpgroup);
    }
    due = flags == 0;
    if (!due) {
      issue_pv();
      finish_pv();
    }
  }
  __syncwarp();                                     // all lanes have waited for Q
  smem.q_pipeline[warpgroup].release(q_state());  // the last S has been computed: the next tile's Q may be loaded
  if (due) {
    issue_pv();
    softmax.template finish<Element>();
    finish_pv();
  } else {
    softmax.template finish<Element>();
  }
}

}  // namespace flash_cute::sm90::forward::masked_rows
