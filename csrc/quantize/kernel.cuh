// Quantises a tensor to float8 in one launch. CTAs draw tasks from a ticket: first the statistics of some blocks, then,
// by turns, those of a block and the writing of one whose group's statistics are there; so that the second reading of
// a group finds it in L2. A CTA that waits for a group does so for tasks with smaller tickets alone, which others have
// drawn before: it need not run beside any CTA in particular.
//
// Where each block has its own descale, and no mean is subtracted, there is nothing to wait for: a block is read
// twice by the CTA that has it, from memory once.
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
  if constexpr (kRotates) rotate(values, params, place.lane);
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
CUTE_DEVICE float block_descale(Values const& mean, Params const& params, Block const& at, Place<kLanes> const& place,
                                Shared<kLanes>& shared) {
  float most = 0;
  CUTE_NO_UNROLL
  for (int first = 0; first < at.rows; first += kHalfRows) {
    Vector<Element> rows[kRows];
    load_rows<false>(rows, first, params, at, place);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      Values const values = row_values<kRotates>(rows[i], mean, params, place);
      bool const is_there = first + place.first_row + i * kRowStep < at.rows && place.column < params.head_dim;
      CUTE_UNROLL
      for (float const x : values.at) {
        float const size = fabsf(x);
        most = is_there && size < kInfinity ? fmaxf(most, size) : most;
      }
    }
  }
  return descale_of(max_of_threads(most, shared), params.is_e5m2);
}

// The sum over the row's columns of the thread's values times those of the mean of k, for the first of the row's threads.
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

// Writes a block whose columns have one descale. `mean`: what is subtracted, or that of k for q, or not used.
template <bool kRotates, class Element, int kLanes>
CUTE_DEVICE void write_rows(Values const& mean, float descale, Params const& params, Block const& at,
                            Place<kLanes> const& place) {
  float const inverse = __frcp_rn(descale);
  auto const divisor_of = [&](int) { return descale; };
  auto const inverse_of = [&](int) { return inverse; };
  uint8_t* const out = params.out + at.offset(params.out_strides) + place.column;
  CUTE_NO_UNROLL
  for (int first = place.first_row; first < at.rows + place.first_row; first += kHalfRows) {
    Vector<Element> rows[kRows];
    load_rows<true>(rows, first - place.first_row, params, at, place);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int const row = first + i * kRowStep;
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
}

// Writes a block whose columns have each their descale; nothing is subtracted from it, and it is not rotated.
template <class Element, int kLanes>
CUTE_DEVICE void write_rows_by_column(Params const& params, Block const& at, Place<kLanes> const& place) {
  Values const divisors = read_columns(params.descale, at.group, params, place);
  Values inverses;
  CUTE_UNROLL
  for (int column = 0; column < kColumns; ++column) inverses.at[column] = __frcp_rn(divisors.at[column]);
  auto const divisor_of = [&](int column) { return divisors.at[column]; };
  auto const inverse_of = [&](int column) { return inverses.at[column]; };
  uint8_t* const out = params.out + at.offset(params.out_strides) + place.column;
  CUTE_NO_UNROLL
  for (int first = 0; first < at.rows; first += kHalfRows) {
    Vector<Element> rows[kRows];
    load_rows<true>(rows, first, params, at, place);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int const row = first + place.first_row + i * kRowStep;
      if (row >= at.rows || place.column >= params.head_dim) continue;
      uint2 const quantized = quantize_columns(unpack(rows[i]), divisor_of, inverse_of, params.is_e5m2);
      __stcs(reinterpret_cast<uint2*>(out + row * params.out_strides.row), quantized);
    }
  }
}

template <bool kRotates, class Element, int kLanes>
CUTE_DEVICE void write_block(Params const& params, int task, Shared<kLanes>& shared) {
  Block const at = find_block(params, task);
  Place<kLanes> const place;
  if (at.is_unused || (params.per == Per::kBlock && at.block >= params.descale_blocks)) {
    return write_unquantized(params, at, place);
  }
  if (params.has_statistics) {
    if (threadIdx.x == 0) {
      while (atomicAdd(params.ready + at.group, 0) == 0) __nanosleep(100);
      __threadfence();
    }
    __syncthreads();
  }
  if (params.per == Per::kChannel) return write_rows_by_column<Element>(params, at, place);
  Values mean{};
  if (params.centers || params.key_mean != nullptr) {
    mean = read_columns(params.centers ? params.mean : params.key_mean, at.group, params, place);
  }
  float descale;
  if (params.per == Per::kBlock) {
    descale = block_descale<kRotates, Element>(mean, params, at, place, shared);
    int64_t const entry = (int64_t{at.sequence} * params.heads + at.head) * params.descale_blocks + at.block;
    if (threadIdx.x == 0) params.descale[entry] = descale;
  } else {
    descale = __ldcg(params.descale + at.group);
  }
  write_rows<kRotates, Element>(mean, descale, params, at, place);
}

// As many as have the registers that the kernel takes; the vectors of float32 take more.
template <class Element, int kLanes, bool kRotates>
constexpr int kCtasPerSm = std::max((sizeof(Element) == 4 || kRotates ? 512 : 768) / kThreads<kLanes>, 1);

template <int kArch, class Element, int kLanes, bool kRotates>
__global__ void __launch_bounds__(kThreads<kLanes>, kCtasPerSm<Element, kLanes, kRotates>)
    quantize_kernel(__grid_constant__ Params const params) {
  __shared__ Shared<kLanes> shared;
  fill_unused(params);
  Work const work = read_work(params);
  // So many blocks have statistics before the first is written: its group's, and one for each CTA, which may all be at
  // work on the last ones.
  int const ahead = params.has_statistics ? min(work.tasks, work.longest_group + static_cast<int>(gridDim.x)) : 0;
  int const tickets = params.has_statistics ? 2 * work.tasks : work.tasks;
  int const by_turns = 2 * (work.tasks - ahead);
  auto const draw = [&] { return static_cast<int>(atomicAdd(params.ticket, 1)); };
  if (threadIdx.x == 0) shared.ticket = draw();
  __syncthreads();
  int ticket = shared.ticket;
  while (ticket < tickets) {
    int next = 0;
    if (threadIdx.x == 0) next = draw();  // it arrives while the block is worked on
    int const turn = ticket - ahead;
    if (!params.has_statistics) {
      write_block<kRotates, Element>(params, ticket, shared);
    } else if (turn < 0) {
      take_statistics<kRotates, Element>(params, ticket, shared);
    } else if (turn < by_turns && turn % 2 == 0) {
      take_statistics<kRotates, Element>(params, ahead + turn / 2, shared);
    } else {
      write_block<kRotates, Element>(params, turn < by_turns ? turn / 2 : turn - by_turns / 2, shared);
    }
    __syncthreads();  // all have read the ticket, and are done with the buffers
    if (threadIdx.x == 0) shared.ticket = next;
    __syncthreads();
    ticket = shared.ticket;
  }
}

}  // namespace flash_cute::quantize
