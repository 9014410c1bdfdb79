// The fold of the chunks of a row, from the first to the last. The CTA that has all chunks and the kernel that folds
// those of several CTAs use these functions alone, so that the bits are equal. A chunk without a key that the row sees
// changes no bit: its factor is 0 where the fold's is 1, or both are of nothing.
#pragma once

#include <cfloat>

#include <cute/tensor.hpp>

#include "core/memory_order.cuh"
#include "core/softmax.cuh"
#include "schedule.cuh"

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

// The folds of CTAs in global memory: of each CTA its own, where shared memory has no room for it, then those that it
// hands to the next CTA; before them a flag for each warp of the latter. A thread's share is read by threads of its
// index alone. Every 128th word is its own: those of the accumulator, and two of the softmax.
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

// A thread's share of the CTA's own fold, in shared memory: of a row's softmax each thread keeps the offset.
template <class Traits>
class SharedFold {
 public:
  CUTE_DEVICE SharedFold(Params const&, typename Traits::SharedStorage& smem, int warpgroup)
      : storage_(smem.results), warpgroup_(warpgroup) {}

  // All threads of the warpgroup have read and written what they did so far.
  CUTE_DEVICE void wait_for_all_threads() const { named_sync(kMerge + warpgroup_, 128); }

  CUTE_DEVICE float4 word(int j) const { return words()[j * 128]; }
  CUTE_DEVICE void set_word(int j, float4 word) { words()[j * 128] = word; }
  CUTE_DEVICE RowState state(int i) const {
    float2 const sums = *row_sums(i);
    return {offset_[i], sums.x, sums.y};
  }
  CUTE_DEVICE void set_states(RowState const (&states)[2]) {  // the four threads of a row store the same
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      offset_[i] = states[i].offset;
      *row_sums(i) = {states[i].sum, states[i].error};
    }
  }

 private:
  CUTE_DEVICE float4* words() const { return &storage_.folds[warpgroup_].words[0][fresh_thread_index() % 128]; }
  CUTE_DEVICE float2* row_sums(int i) const {
    return &storage_.sums[warpgroup_][first_row_of_thread(fresh_thread_index() % 128) + 8 * i];
  }

  decltype(std::declval<typename Traits::SharedStorage>().results)& storage_;
  int warpgroup_;
  float offset_[2] = {0.f, 0.f};
};

// The same in global memory.
template <class Traits>
class MemoryFold {
 public:
  CUTE_DEVICE MemoryFold(Params const& params, typename Traits::SharedStorage&, int warpgroup)
      : params_(params), warpgroup_(warpgroup) {}

  CUTE_DEVICE void wait_for_all_threads() const {}  // no thread reads another's

  CUTE_DEVICE float4 word(int j) const { return __ldcg(words() + j * 128); }
  CUTE_DEVICE void set_word(int j, float4 word) { __stcg(words() + j * 128, word); }
  CUTE_DEVICE RowState state(int i) const {
    float4 const word = __ldcg(words() + (kPairs + i) * 128);
    return {word.x, word.y, word.z};
  }
  CUTE_DEVICE void set_states(RowState const (&states)[2]) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      __stcg(words() + (kPairs + i) * 128, float4{states[i].offset, states[i].sum, states[i].error, 0.f});
    }
  }

 private:
  static constexpr int kPairs = Traits::kHeadDim / 8;

  CUTE_DEVICE float4* words() const {
    return Folds<Traits>{params_.parts}.words(fresh_block_index(), /*handed=*/false, warpgroup_);
  }

  Params const& params_;
  int warpgroup_;
};

template <class Traits>
using OwnFold = std::conditional_t<Traits::kSmem.has_fold, SharedFold<Traits>, MemoryFold<Traits>>;

template <class Softmax>
CUTE_DEVICE RowState state_of_row(Softmax const& softmax, int i) {
  return {softmax.offset[i], softmax.sum[i], softmax.error[i]};
}

// Stores the chunk in the registers as the fold.
template <class Fold, class Softmax, class Accumulator>
CUTE_DEVICE void begin_fold(Fold& fold, Softmax const& softmax, Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  CUTE_UNROLL
  for (int j = 0; j < size<1>(acc) / 2; ++j) {
    fold.set_word(j, {acc(0, 2 * j), acc(0, 2 * j + 1), acc(1, 2 * j), acc(1, 2 * j + 1)});
  }
  fold.set_states({state_of_row(softmax, 0), state_of_row(softmax, 1)});
}

// Adds the chunk in the registers to the fold: the sum is in the registers; with kStore in the fold too.
template <bool kStore, class Fold, class Softmax, class Accumulator>
CUTE_DEVICE void add_to_fold(Fold& fold, Softmax& softmax, Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  RowState states[2] = {fold.state(0), fold.state(1)};
  __syncwarp();  // the four threads of a row have read what each of them will write
  Factors factors[2];
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    factors[i] = add_chunk(states[i], state_of_row(softmax, i));
    softmax.offset[i] = states[i].offset;
    softmax.sum[i] = states[i].sum;
    softmax.error[i] = states[i].error;
  }
  if constexpr (kStore) fold.set_states(states);
  constexpr int kAtOnce = 8;
  CUTE_UNROLL
  for (int j = 0; j < size<1>(acc) / 2; ++j) {
    if (j > 0 && j % kAtOnce == 0) __syncwarp();  // limits hoisted loads to what the registers hold
    float4 const word = fold.word(j);
    acc(0, 2 * j) = factors[0].add(word.x, acc(0, 2 * j));
    acc(0, 2 * j + 1) = factors[0].add(word.y, acc(0, 2 * j + 1));
    acc(1, 2 * j) = factors[1].add(word.z, acc(1, 2 * j));
    acc(1, 2 * j + 1) = factors[1].add(word.w, acc(1, 2 * j + 1));
    if constexpr (kStore) {
      fold.set_word(j, {acc(0, 2 * j), acc(0, 2 * j + 1), acc(1, 2 * j), acc(1, 2 * j + 1)});
    }
  }
}

// Takes the fold that the CTA before has handed on as the own one.
template <class Traits>
CUTE_DEVICE void take_fold(Folds<Traits> const& folds, int warpgroup, OwnFold<Traits>& own) {
  constexpr int kPairs = Traits::kHeadDim / 8;
  int const cta = fresh_block_index() - 1;
  // The CTA has a lower number, so that it runs already, and waits for none but those of lower numbers.
  while (uniform(load_acquire(folds.flag(cta, warpgroup))) == 0) continue;
  __syncwarp();
  own.wait_for_all_threads();  // the results of the row tile before have passed through its memory
  float4 const* const words = folds.words(cta, /*handed=*/true, warpgroup);
#pragma unroll 4
  for (int j = 0; j < kPairs; ++j) own.set_word(j, __ldcg(words + j * 128));
  float4 const first = __ldcg(words + kPairs * 128), second = __ldcg(words + (kPairs + 1) * 128);
  own.set_states({RowState{first.x, first.y, first.z}, RowState{second.x, second.y, second.z}});
}

// Hands the fold in the registers to the CTA behind this one.
template <class Traits, class Softmax, class Accumulator>
CUTE_DEVICE void hand_on_fold(Folds<Traits> const& folds, int warpgroup, Softmax const& softmax,
                              Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  float4* const words = folds.words(fresh_block_index(), /*handed=*/true, warpgroup);
  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  constexpr int kPairs = decltype(size<1>(acc))::value / 2;
  CUTE_UNROLL
  for (int j = 0; j < kPairs; ++j) {
    __stcg(words + j * 128, float4{acc(0, 2 * j), acc(0, 2 * j + 1), acc(1, 2 * j), acc(1, 2 * j + 1)});
  }
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    __stcg(words + (kPairs + i) * 128, float4{softmax.offset[i], softmax.sum[i], softmax.error[i], 0.f});
  }
  jitter();
  __syncwarp();  // all lanes have stored: lane 0 releases for the warp
  if (fresh_thread_index() % 32 == 0) store_release(folds.flag(fresh_block_index(), warpgroup), 1);
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
