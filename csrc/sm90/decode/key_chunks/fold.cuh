// The fold of the chunks of a row, from the first to the last. The CTA that has all chunks and the kernel that folds
// those of several CTAs use these functions alone, so that the bits are equal. A chunk without a key that the row sees
// changes no bit: its factor is 0 where the fold's is 1, or both are of nothing.
#pragma once

#include <cfloat>

#include <cute/tensor.hpp>

#include "core/memory_order.cuh"
#include "core/softmax.cuh"

namespace flash_cute::sm90::decode::key_chunks {

// Of a row's softmax, after OnlineSoftmax::finish().
struct RowState {
  float offset;
  float sum;
  float error;
};

// What a fold and the next chunk are multiplied by.
struct Factors {
  float fold;
  float chunk;

  CUTE_DEVICE float add(float folded, float of_chunk) const {
    return __fmaf_rn(of_chunk, chunk, __fmul_rn(folded, fold));
  }
};

// Adds the state of the next chunk to that of a fold.
CUTE_DEVICE Factors add_chunk(RowState& fold, RowState const& chunk) {
  float const offset = fmaxf(fold.offset, chunk.offset);
  Factors const factors{exp2_approx(__fsub_rn(fold.offset, offset)), exp2_approx(__fsub_rn(chunk.offset, offset))};
  fold = {offset, factors.add(fold.sum, chunk.sum), factors.add(fold.error, chunk.error)};
  return factors;
}

// The folds of CTAs in global memory: of each CTA its own, then those that it hands to the next CTA; before them a flag
// for each warp of the latter. A thread's share is read by threads of its index alone. Every 128th word is its own.
template <class Traits>
struct Folds {
  float* memory;

  static constexpr int kWarps = 4 * Traits::kWarpgroups;  // of a CTA
  static constexpr int kWords = forward::rows::part_floats(Traits::kHeadDim) / 4;

  CUTE_DEVICE int* flag(int cta, int warpgroup) const {
    return reinterpret_cast<int*>(memory) + cta * kWarps + warpgroup * 4 + fresh_thread_index() % 128 / 32;
  }
  CUTE_DEVICE float4* words(int cta, bool handed, int warpgroup) const {
    int const slot = ((handed ? int(gridDim.x) : 0) + cta) * Traits::kWarpgroups + warpgroup;
    auto* const folds = reinterpret_cast<float4*>(memory) + int(gridDim.x) * (kWarps / 4);
    return folds + int64_t{slot} * (kWords * 128) + fresh_thread_index() % 128;
  }
};

template <class Traits, class Softmax, class Accumulator>
CUTE_DEVICE void keep_fold(Folds<Traits> const& folds, bool to_other, int warpgroup, Softmax const& softmax,
                           Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  float4* const words = folds.words(fresh_block_index(), to_other, warpgroup);
  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  constexpr int kPairs = decltype(size<1>(acc))::value / 2;
  CUTE_UNROLL
  for (int j = 0; j < kPairs; ++j) {
    __stcg(words + j * 128, float4{acc(0, 2 * j), acc(0, 2 * j + 1), acc(1, 2 * j), acc(1, 2 * j + 1)});
  }
  __stcg(words + kPairs * 128, float4{softmax.offset[0], softmax.offset[1], softmax.sum[0], softmax.sum[1]});
  __stcg(words + (kPairs + 1) * 128, float4{softmax.error[0], softmax.error[1], 0.f, 0.f});
  if (!to_other) return;
  jitter();
  __syncwarp();  // all lanes have stored: lane 0 releases for the warp
  if (fresh_thread_index() % 32 == 0) store_release(folds.flag(fresh_block_index(), warpgroup), 1);
}

// Adds the chunk in the registers to the fold in memory: the sum is in the registers.
template <class Traits, class Softmax, class Accumulator>
CUTE_DEVICE void add_to_fold(Folds<Traits> const& folds, bool from_other, int warpgroup, Softmax& softmax,
                             Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  if (from_other) {
    // Its CTA has a lower number, so that it runs already, and waits for none but those of lower numbers.
    while (uniform(load_acquire(folds.flag(fresh_block_index() - 1, warpgroup))) == 0) continue;
    __syncwarp();
  }
  float4 const* const words = folds.words(fresh_block_index() - int(from_other), from_other, warpgroup);
  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  constexpr int kPairs = decltype(size<1>(acc))::value / 2;
  float4 const state = __ldcg(words + kPairs * 128), errors = __ldcg(words + (kPairs + 1) * 128);
  RowState folds_of_rows[2] = {{state.x, state.z, errors.x}, {state.y, state.w, errors.y}};
  Factors factors[2];
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    factors[i] = add_chunk(folds_of_rows[i], {softmax.offset[i], softmax.sum[i], softmax.error[i]});
    softmax.offset[i] = folds_of_rows[i].offset;
    softmax.sum[i] = folds_of_rows[i].sum;
    softmax.error[i] = folds_of_rows[i].error;
  }
  constexpr int kAtOnce = Traits::kHeadDim > 128 ? 8 : kPairs;
  CUTE_UNROLL
  for (int j = 0; j < kPairs; ++j) {
    if (j > 0 && j % kAtOnce == 0) __syncwarp();  // limits hoisted loads to what the registers hold
    float4 const fold = __ldcg(words + j * 128);
    acc(0, 2 * j) = factors[0].add(fold.x, acc(0, 2 * j));
    acc(0, 2 * j + 1) = factors[0].add(fold.y, acc(0, 2 * j + 1));
    acc(1, 2 * j) = factors[1].add(fold.z, acc(1, 2 * j));
    acc(1, 2 * j + 1) = factors[1].add(fold.w, acc(1, 2 * j + 1));
  }
}

// The part of a chunk in the workspace, see Slots.
struct Part {
  float* acc;         // (rows, head_dim of the kernel)
  float* statistics;  // (3, rows)

  CUTE_DEVICE static Part of(float* parts, Slots const& slots, int head_dim, int64_t number) {
    float* const acc = parts + number * slots.part(head_dim);
    return {acc, acc + int64_t{slots.rows} * head_dim};
  }
};

template <class Traits, class Softmax, class Accumulator>
CUTE_DEVICE void store_part(Part const& part, int rows, Softmax const& softmax,
                            Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  int const thread = fresh_thread_index() % 128, first_row = first_row_of_thread(thread);
  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    int const row = first_row + 8 * i;
    if (row >= rows) continue;
    float* const to = part.acc + row * Traits::kHeadDim + 2 * (thread % 4);
    CUTE_UNROLL
    for (int j = 0; j < size<1>(acc); j += 2) {
      __stcg(reinterpret_cast<float2*>(to + 4 * j), float2{acc(i, j), acc(i, j + 1)});
    }
    if (thread % 4 == 0) {
      __stcg(part.statistics + row, softmax.offset[i]);
      __stcg(part.statistics + rows + row, softmax.sum[i]);
      __stcg(part.statistics + 2 * rows + row, softmax.error[i]);
    }
  }
}

}  // namespace flash_cute::sm90::decode::key_chunks
