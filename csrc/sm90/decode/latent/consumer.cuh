// What the two warpgroups do with a unit of work. Each has 64 rows and half of V's columns, since the accumulators of
// all do not fit in the registers of one. The scores of a piece's tiles they compute by turns (the seesaw of FlashMLA),
// warpgroup 0 the even ones, and tell each other P. The softmax of one runs under the other's products:
//
//     warpgroup 0 | S(0) | softmax(0) | O += P(0) V(0) | S(2) | O += P(1) V(1), softmax(2) | O += P(2) V(2) | S(4) ...
//     warpgroup 1 | S(1) |  O += P(0) V(0), softmax(1) | O += P(1) V(1) | S(3) | O += P(2) V(2), softmax(3) | ...
//
// Both add the tiles in the same order, and P(i) is measured from the maximum after tile i.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "core/split_keys/rows.cuh"
#include "queries.cuh"
#include "results.cuh"
#include "ring.cuh"
#include "sm90/common/warpgroup.cuh"
#include "softmax.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::latent {

// `kByTma`: how key tiles are loaded.
template <class Traits, bool kByTma>
class Consumer {
 public:
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;

  CUTE_DEVICE Consumer(DecodeParams const& params, SharedStorage& smem)
      : params_(params),
        smem_(smem),
        warpgroup_(uniform(threadIdx.x / 128)),
        warp_(uniform(threadIdx.x / 32 % 4)),
        thread_(threadIdx.x % 128) {}

  CUTE_DEVICE void run() {
#pragma unroll 1
    for (PipelineState<2> state;; state.advance()) {
      smem_.unit_pipeline.wait_full(state);
      Unit const& unit = smem_.units[state.stage];
      if (uniform(unit.rows) == 0) break;
      load_queries(params_, unit, opaque(smem_.q));  // no warpgroup reads those before: both have ended the last piece
      named_sync(kAllConsumers, kConsumers);
      compute(unit);
      __syncwarp();
      smem_.unit_pipeline.release(state);
    }
  }

 private:
  CUTE_DEVICE void compute(Unit const& unit) {
    typename Traits::MmaPV mma;
    Results<Traits> results(params_, unit, smem_, warpgroup_);
    int const piece_begin = uniform(unit.piece_begin), piece_end = uniform(unit.piece_end);
#pragma unroll 1
    for (int piece = piece_begin; piece < piece_end; ++piece) {
      auto tOrO = partition_fragment_C(mma, Shape<Int<kRows>, Int<kColumns>>{});  // (MMA, MMA_M, MMA_D)
      Softmax softmax(params_.scale_log2);
      clear(tOrO);
      int const begin = uniform(unit.begin_of(piece)), end = uniform(unit.end_of(piece));
      compute_piece(unit, begin, end - begin, softmax, tOrO);
      auto acc = rowcol_view(tOrO);  // (rows, columns)
      results.add(piece, softmax, acc);
    }
  }

  // A long function: its parts, the lambdas, work on the same tensors. The loop over key tiles is at the end.
  template <class Accumulator>
  CUTE_DEVICE void compute_piece(Unit const& unit, int first_tile, int steps, Softmax& softmax,
                                 Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
    typename Traits::MmaQK mma_qk;
    typename Traits::MmaPV mma_pv;
    auto tSrS = partition_fragment_C(mma_qk, Shape<Int<kRows>, Int<kTileKeys>>{});  // (MMA, MMA_M, MMA_N)
    auto rP = make_tensor_like<Element>(tSrS);                                      // (MMA, MMA_M, MMA_N)
    auto rP_other = make_tensor_like<Element>(tSrS);                                // (MMA, MMA_M, MMA_N)
    auto tOrP = make_tensor(rP.data(), operand_a_layout_64(rP.layout()));           // (MMA, MMA_M, MMA_K)
    auto tOrP_other = make_tensor(rP_other.data(), operand_a_layout_64(rP.layout()));  // (MMA, MMA_M, MMA_K)
    auto scores = rowcol_view(tSrS);                                                // (rows, columns)
    auto acc = rowcol_view(tOrO);                                                   // (rows, columns)
    int const warpgroup = warpgroup_, tiles_before = tiles_;

    // Layouts alone: where operands are, `operands` says.
    auto sChunk = make_tensor(make_smem_ptr(smem_.q), typename Traits::SmemLayoutChunk{});  // (64, 64)
    auto sVt = make_tensor(make_smem_ptr(smem_.q), typename Traits::SmemLayoutVt{});        // (D, N)
    auto tSrQ = mma_qk.get_slice(0).partition_fragment_A(sChunk);                           // (MMA, MMA_M, MMA_K)
    auto tSrK = mma_qk.get_slice(0).partition_fragment_B(sChunk);                           // (MMA, MMA_N, MMA_K)
    auto tOrV = mma_pv.get_slice(0).partition_fragment_B(sVt);                              // (MMA, MMA_D, MMA_N)
    Operands const operands(smem_);
    constexpr uint32_t kChunkBytes = kChunkElements * sizeof(Element), kTileBytes = kChunks * kChunkBytes;

    // The stage of tile i of the piece.
    auto stage_of = [&](int i) { return at_step(tiles_before + i); };
    auto columns_of = [&](int stage) { return smem_.tiles[stage] + warpgroup * (kColumnChunks * kChunkElements); };
    auto release_columns = [&](int i) { arrive_once(smem_.empty[stage_of(i).stage][warpgroup]); };

    auto issue_scores = [&](auto accumulate, int step, PipelineState<kStages> stage) __attribute__((always_inline)) {
      int const chunk = chunk_at(step, warpgroup);
      wait_for(smem_.full[stage.stage][chunk], stage.phase);  // the chunk has landed
      if constexpr (!kByTma) fence_copies();
      uint32_t const bytes = chunk * kChunkBytes;
      auto tSrQ_chunk = operands.at(tSrQ, smem_.q, bytes);
      issue_gemm<decltype(accumulate)::value>(
          mma_qk, tSrQ_chunk, operands.at(tSrK, smem_.tiles, stage.stage * kTileBytes + bytes), tSrS);
    };
    // Waits for the tile's columns of V, and clears the rows that no row of Q sees: they may be anything, NaN too.
    auto wait_columns = [&](int i) __attribute__((always_inline)) {
      auto const stage = stage_of(i);
      CUTE_UNROLL
      for (int chunk = 0; chunk < kColumnChunks; ++chunk) {
        wait_for(smem_.full[stage.stage][warpgroup * kColumnChunks + chunk], stage.phase);
      }
      if constexpr (!kByTma) fence_copies();
      int const first_key = (first_tile + i) * kTileKeys;
      int const begin = uniform(unit.seen_begin) - first_key, end = uniform(unit.seen_end) - first_key;
      if (begin > 0 || end < kTileKeys) clear_rows(columns_of(stage.stage), begin, end);
    };
    auto issue_product = [&](auto& tOrP_i, int i) __attribute__((always_inline)) {
      uint32_t const bytes = stage_of(i).stage * kTileBytes + warpgroup * kColumnChunks * kChunkBytes;
      issue_gemm<Accumulate::kAdd>(mma_pv, tOrP_i, operands.at(tOrV, smem_.tiles, bytes), tOrO);
    };
    auto wait_all = [&]() __attribute__((always_inline)) {
      warpgroup_wait<0>();
      warpgroup_fence_operand(tOrO);
    };
    auto rescale = [&](float const (&factors)[2]) __attribute__((always_inline)) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTE_UNROLL
        for (int j = 0; j < size<1>(acc); ++j) acc(r, j) *= factors[r];
      }
    };
    // P of the other warpgroup's tile, and its maxima, which the accumulators follow.
    auto receive = [&]() __attribute__((always_inline)) {
      wait_for(smem_.sent[1 - warpgroup][warp_], received_);
      received_ ^= 1;
      auto vectors = recast<uint4>(rP_other);
      CUTE_UNROLL
      for (int v = 0; v < size(vectors); ++v) vectors(v) = smem_.weights[v][thread_];
      float2 const maxima = smem_.maxima[thread_];
      float const new_max[2] = {maxima.x, maxima.y};
      float factors[2];
      if (__any_sync(0xffffffff, softmax.grows(new_max))) {
        softmax.follow(new_max, factors);
        rescale(factors);
      }
    };
    // Numerators of half of the columns, and as weights to the other warpgroup.
    auto compute_weights = [&](auto half) __attribute__((always_inline)) {
      softmax.numerators<half>(scores);
      auto const numerators = local_tile(tSrS, Shape<Int<16>>{}, half);  // the columns of a half lie side by side
      auto weights = local_tile(rP, Shape<Int<16>>{}, half);
      convert(numerators, weights);
      auto const vectors = recast<uint4>(rP);
      CUTE_UNROLL
      for (int v = 2 * half; v < 2 * half + 2; ++v) smem_.weights[v][thread_] = vectors(v);
    };
    auto send = [&]() __attribute__((always_inline)) {
      smem_.maxima[thread_] = {softmax.max[0], softmax.max[1]};
      __syncwarp();
      arrive_once(smem_.sent[warpgroup][warp_]);
    };

#pragma unroll 1
    for (int i = warpgroup; i < steps; i += kWarpgroups) {
      auto const stage = stage_of(i);
      issue_scores(C<Accumulate::kOverwrite>{}, 0, stage);
      CUTE_UNROLL
      for (int step = 1; step < kChunks; ++step) issue_scores(C<Accumulate::kAdd>{}, step, stage);
      if (i > 0) {
        receive();
        wait_columns(i - 1);
        issue_product(tOrP_other, i - 1);
        warpgroup_wait<1>();
      } else {
        warpgroup_wait<0>();
      }
      warpgroup_fence_operand(tSrS);
      arrive_once(smem_.empty[stage.stage][kWarpgroups]);

      int const first_key = (first_tile + i) * kTileKeys;
      flash_cute::split_keys::modify_and_mask(params_, unit, first_row_of_thread(thread_), first_key, kTileKeys,
                                              scores);
      float factors[2];
      bool const grown = softmax.update_max(scores, factors);
      compute_weights(_0{});
      wait_all();  // by now the other tile's product is there: its place is wanted as early as possible
      if (i > 0) release_columns(i - 1);
      compute_weights(_1{});
      send();
      if (grown) rescale(factors);
      wait_columns(i);
      issue_product(tOrP, i);
      wait_all();  // the tile after next takes this one's place
      release_columns(i);
    }
    // The last tile, if it is the other warpgroup's.
    if (steps > 0 && (steps - 1) % kWarpgroups != warpgroup) {
      receive();
      wait_columns(steps - 1);
      issue_product(tOrP_other, steps - 1);
      wait_all();
      release_columns(steps - 1);
    }
    tiles_ += steps;
  }

  // WGMMA reads what other threads have copied.
  CUTE_DEVICE static void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

  // Of the warpgroup's columns of V: makes the rows outside of [begin, end) zeros. By all its threads.
  CUTE_DEVICE void clear_rows(Element* values, int begin, int end) const {
    constexpr int kVectors = kChunk / 8;  // of a row
    auto* const vectors = reinterpret_cast<uint4*>(values);
#pragma unroll 1
    for (int i = thread_; i < kColumnChunks * kTileKeys * kVectors; i += 128) {
      int const row = i / kVectors % kTileKeys;
      if (row < begin || row >= end) vectors[i] = uint4{};
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    named_sync(kCleared + warpgroup_, 128);
  }

  DecodeParams const& params_;
  SharedStorage& smem_;
  int warpgroup_;
  int warp_;    // in the warpgroup
  int thread_;  // in the warpgroup
  int tiles_ = 0;     // before the piece
  int received_ = 0;  // phase of the next message
};

}  // namespace flash_cute::sm90::decode::latent
