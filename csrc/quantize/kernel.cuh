// Quantises a tensor to float8 in one launch. CTAs draw tasks from a ticket: first the statistics of some blocks, then,
// by turns, those of a block and the writing of one whose group's statistics are there; so that the second reading of
// a group finds it in L2. A CTA that waits for a group does so for tasks with smaller tickets alone, which others have
// drawn before: it need not run beside any CTA in particular.
//
// Where each block has its own descale, and no mean is subtracted, there is nothing to wait for: a block is read once.
#pragma once

#include <algorithm>

#include "statistics.cuh"

namespace flash_cute::quantize {

// Entries that no block writes: of sequences without rows, and of blocks behind a sequence's last.
CUTE_DEVICE void fill_unused(Params const& params) {
  bool const is_packed = params.cu_seqlens != nullptr;
  if (!is_packed && params.blocks > 0) return;
  int64_t const first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, step = int64_t{gridDim.x} * blockDim.x;
  auto const blocks = [&](int sequence) { return is_packed ? blocks_of(SequenceTable(params).lengths[sequence]) : 0; };
  int64_t const columns = int64_t{params.heads_kv} * params.head_dim;
  int64_t const of_sequence = params.per == Per::kBlock  ? int64_t{params.heads} * params.descale_blocks
                              : params.per == Per::kHead ? params.heads_kv
                                                         : columns;
  for (int64_t entry = first; entry < params.batch * of_sequence; entry += step) {
    int const block = params.per == Per::kBlock ? static_cast<int>(entry % params.descale_blocks) : 0;
    if (block >= blocks(static_cast<int>(entry / of_sequence))) params.descale[entry] = 1.0f;
  }
  if (!params.centers) return;
  for (int64_t entry = first; entry < params.batch * columns; entry += step) {
    if (blocks(static_cast<int>(entry / columns)) == 0) params.mean[entry] = 0.0f;
  }
}

// x / divisor, correctly rounded: `inverse` is 1 / divisor. Inf and NaN stay.
CUTE_DEVICE float divide(float x, float divisor, float inverse) {
  float const quotient = __fmul_rn(x, inverse);
  float const better = __fmaf_rn(__fmaf_rn(-quotient, divisor, x), inverse, quotient);
  return fabsf(quotient) < kInfinity ? better : quotient;
}

// The values of a row as they are quantised. `mean`: what is subtracted, if anything is.
template <bool kRotates, class Element, int kLanes>
CUTE_DEVICE Values row_values(Vector<Element> const& row, Values const& mean, Params const& params,
                              Place<kLanes> const& place) {
  Values values = unpack(row);
  if constexpr (kRotates) {
    if (params.hadamard > 0) rotate(values, params, place.lane);
  }
  if (params.centers) {
    CUTE_UNROLL
    for (int column = 0; column < kColumns; ++column) values.at[column] = __fsub_rn(values.at[column], mean.at[column]);
  }
  return values;
}

// The thread's columns of (groups, head_dim), which another CTA may have written.
template <int kLanes>
CUTE_DEVICE Values read_columns(float const* data, int64_t group, Params const& params, Place<kLanes> const& place) {
  Values values;
  bool const is_there = place.column < params.head_dim;
  float4 const* const source = reinterpret_cast<float4 const*>(data + group * params.head_dim + place.column);
  float4 const low = is_there ? __ldcg(source) : float4{}, high = is_there ? __ldcg(source + 1) : float4{};
  values.at[0] = low.x, values.at[1] = low.y, values.at[2] = low.z, values.at[3] = low.w;
  values.at[4] = high.x, values.at[5] = high.y, values.at[6] = high.z, values.at[7] = high.w;
  return values;
}

// The descale of a block of its own, for all threads.
template <bool kRotates, class Element, int kLanes>
CUTE_DEVICE float block_descale(Vector<Element> const (&rows)[kRows], Values const& mean, Params const& params,
                                Block const& at, Place<kLanes> const& place, Shared<kLanes>& shared) {
  float most = 0;
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    Values const values = row_values<kRotates>(rows[i], mean, params, place);
    bool const is_there = place.first_row + i * kRowStep < at.rows && place.column < params.head_dim;
    CUTE_UNROLL
    for (float const x : values.at) {
      float const size = fabsf(x);
      most = is_there && size < kInfinity ? fmaxf(most, size) : most;
    }
  }
  return descale_of(max_of_threads(most, shared), params.is_e5m2);
}

// The product of a row with the mean of k, of which each thread has its columns.
template <int kLanes>
CUTE_DEVICE float times_key_mean(Values const& values, Values const& key_mean) {
  float product = 0;
  CUTE_UNROLL
  for (int column = 0; column < kColumns; ++column) {
    product = __fmaf_rn(values.at[column], key_mean.at[column], product);
  }
  CUTE_UNROLL
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    product += __shfl_xor_sync(0xffffffff, product, distance);
  }
  return product;
}

// The thread's columns, quantised. `divisor_of` and `inverse_of`: of a column.
template <class Divisor, class Inverse>
CUTE_DEVICE uint2 quantize_columns(Values const& values, Divisor divisor_of, Inverse inverse_of, bool is_e5m2) {
  uint32_t pairs[kColumns / 2];
  CUTE_UNROLL
  for (int i = 0; i < kColumns / 2; ++i) {
    float const low = divide(values.at[2 * i], divisor_of(2 * i), inverse_of(2 * i));
    float const high = divide(values.at[2 * i + 1], divisor_of(2 * i + 1), inverse_of(2 * i + 1));
    pairs[i] = fp8_pair(low, high, is_e5m2);
  }
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// Writes rows of no sequence as 0, and rows behind the blocks that there are descales for as NaN.
template <int kLanes>
CUTE_DEVICE void write_unquantized(Params const& params, Block const& at, Place<kLanes> const& place) {
  uint32_t const word = at.is_unused ? 0 : 0x7f7f7f7f;
  uint8_t* const out = params.out + at.offset(params.out_strides) + place.column;
  for (int row = place.first_row; row < at.rows; row += kRowStep) {
    if (place.column < params.head_dim) *reinterpret_cast<uint2*>(out + row * params.out_strides.row) = {word, word};
    if (params.key_mean != nullptr && place.lane == 0) {
      params.shift[at.offset(params.shift_strides) + row] = at.is_unused ? 0.0f : __uint_as_float(0x7fffffff);
    }
  }
}

// Writes a block. `mean`: what is subtracted, or that of k for q, or not used. A thread's columns have one descale, or
// each its own; those have no mean, and are not rotated.
template <bool kRotates, class Element, int kLanes, class Divisor, class Inverse>
CUTE_DEVICE void write_rows(Vector<Element> const (&rows)[kRows], Values const& mean, Divisor divisor_of,
                            Inverse inverse_of, Params const& params, Block const& at, Place<kLanes> const& place) {
  uint8_t* const out = params.out + at.offset(params.out_strides) + place.column;
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    int const row = place.first_row + i * kRowStep;
    Values const values = row_values<kRotates>(rows[i], mean, params, place);
    if (params.key_mean != nullptr) {
      float const product = times_key_mean<kLanes>(values, mean);
      if (row < at.rows && place.lane == 0) params.shift[at.offset(params.shift_strides) + row] = product;
    }
    if (row >= at.rows || place.column >= params.head_dim) continue;
    uint2 const quantized = quantize_columns(values, divisor_of, inverse_of, params.is_e5m2);
    __stcs(reinterpret_cast<uint2*>(out + row * params.out_strides.row), quantized);
  }
}

// The descale of the whole block. The first of a group's blocks writes the group's, where no mean did so.
template <bool kRotates, class Element, int kLanes>
CUTE_DEVICE float descale_of_block(Vector<Element> const (&rows)[kRows], Values const& mean, Params const& params,
                                   Block const& at, bool is_first, Place<kLanes> const& place,
                                   Shared<kLanes>& shared) {
  if (params.per == Per::kBlock) {
    float const descale = block_descale<kRotates>(rows, mean, params, at, place, shared);
    int64_t const entry = (int64_t{at.sequence} * params.heads + at.head) * params.descale_blocks + at.block;
    if (threadIdx.x == 0) params.descale[entry] = descale;
    return descale;
  }
  if (params.centers) return __ldcg(params.descale + at.group);
  float const descale = descale_of(__uint_as_float(__ldcg(params.amax + at.group)), params.is_e5m2);
  if (is_first && threadIdx.x == 0) params.descale[at.group] = descale;
  return descale;
}

template <bool kRotates, class Element, int kLanes>
CUTE_DEVICE void write_block(Params const& params, int task, Shared<kLanes>& shared) {
  Block const at = find_block(params, task);
  Place<kLanes> const place;
  if (at.is_unused || (params.per == Per::kBlock && at.block >= params.descale_blocks)) {
    return write_unquantized(params, at, place);
  }
  bool const is_first = task == at.group_begin;
  Vector<Element> rows[kRows];
  load_rows<true>(rows, 0, params, at, place);  // they arrive while the rest is waited for
  if (params.has_statistics) wait_for_group(params, at);
  Values mean{};
  if constexpr (!kRotates || kServesBoth<Element, kLanes>) {
    if (params.per == Per::kChannel) {
      Values divisors = read_columns(reinterpret_cast<float const*>(params.amax), at.group, params, place), inverses;
      CUTE_UNROLL
      for (int column = 0; column < kColumns; ++column) {
        float const divisor = descale_of(divisors.at[column], params.is_e5m2);
        int64_t const entry = int64_t{at.group} * params.head_dim + place.column + column;
        if (is_first && place.first_row == 0 && place.column < params.head_dim) params.descale[entry] = divisor;
        divisors.at[column] = divisor;
        inverses.at[column] = __frcp_rn(divisor);
      }
      auto const divisor_of = [&](int column) { return divisors.at[column]; };
      auto const inverse_of = [&](int column) { return inverses.at[column]; };
      return write_rows<false>(rows, mean, divisor_of, inverse_of, params, at, place);
    }
  }
  if (params.centers || params.key_mean != nullptr) {
    mean = read_columns(params.centers ? params.mean : params.key_mean, at.group, params, place);
  }
  float const descale = descale_of_block<kRotates>(rows, mean, params, at, is_first, place, shared);
  float const inverse = __frcp_rn(descale);
  auto const divisor_of = [&](int) { return descale; };
  write_rows<kRotates>(rows, mean, divisor_of, [&](int) { return inverse; }, params, at, place);
}

// As many as have the registers that the kernel takes: 80 or, where there are fewer CTAs, up to 128. Without the
// instruction that converts to float8, 80 spill.
template <int kArch, class Element, int kLanes, bool kRotates>
constexpr int kCtasPerSm =
    std::max((kArch < 90 || sizeof(Element) == 4 || kRotates ? 512 : 768) / kThreads<kLanes>, 1);

template <int kArch, class Element, int kLanes, bool kRotates>
__global__ void __launch_bounds__(kThreads<kLanes>, kCtasPerSm<kArch, Element, kLanes, kRotates>)
    quantize_kernel(__grid_constant__ Params const params) {
  __shared__ Shared<kLanes> shared;
  fill_unused(params);
  auto const draw = [&] { return static_cast<int>(atomicAdd(params.ticket, 1)); };
  if (threadIdx.x == 0) {
    Work const work = read_work(params);
    // So many blocks have statistics before the first is written: its group's, and one for each CTA, which may all be
    // at work on the last ones.
    int const ahead = params.has_statistics ? min(work.tasks, work.longest_group + static_cast<int>(gridDim.x)) : 0;
    shared.ahead = ahead;
    shared.by_turns = params.has_statistics ? 2 * (work.tasks - ahead) : 0;
    shared.tickets = params.has_statistics ? 2 * work.tasks : work.tasks;
    shared.ticket = draw();
  }
  __syncthreads();
  while (shared.ticket < shared.tickets) {
    int next = 0;
    if (threadIdx.x == 0) next = draw();  // it arrives while the block is worked on
    int const turn = shared.ticket - shared.ahead;
    bool const is_first = turn < 0, is_by_turns = turn < shared.by_turns, is_even = turn % 2 == 0;
    // Each function is called in one place alone: it is inlined, and is most of the kernel.
    if (is_first || (is_by_turns && is_even)) {
      take_statistics<kRotates, Element>(params, is_first ? shared.ticket : shared.ahead + turn / 2, shared);
    } else {
      write_block<kRotates, Element>(params, is_by_turns ? turn / 2 : turn - shared.by_turns / 2, shared);
    }
    __syncthreads();  // all have read the ticket, and are done with the buffers
    if (threadIdx.x == 0) shared.ticket = next;
    __syncthreads();
  }
}

}  // namespace flash_cute::quantize
