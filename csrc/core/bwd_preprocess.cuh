// The kernel before the backward's main one: per row the log-sum-exp in base 2 and delta = rowsum(dO * O) - dLSE; it
// also clears the dQ accumulator (where asked) and the counters. Memory-bound: O and dO are read once, the accumulator
// is written once.
//
// With sinks the log-sum-exp becomes that of the keys and the sink, L' = LSE + log(1 + e) with e = exp(sink - LSE), so
// that the main kernel's P is the share of each key. The LSE itself is of the keys alone: in delta its gradient is
// multiplied by 1 + e. The gradient of the sink is minus the sum of its share, e / (1 + e), times rowsum(dO * O).
//
// With float16, or a kernel that keeps P in it, sinks and a gradient of the LSE, P of a row in which the sink has
// nearly all of the weight would be rounded to 0, while that gradient needs it times 1 + e. There 1 + e = 2^k m, 1 <= m
// < 2, is divided between two: L' = LSE + log(m), so that P sums to more than 1/2, and dO is multiplied by 2^-k, which
// rounds nothing but float16's subnormals, in `scaled_dout`, which the main kernel reads instead.
#pragma once

#include <cuda_runtime.h>

#include <cute/tensor.hpp>
#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>

#include "contract/plan.h"
#include "sequence_tiles.cuh"
#include "sink.cuh"

namespace flash_cute {

using namespace cute;

// The index of a row's statistics among those of its row tile.
struct RowOrder {
  CUTE_HOST_DEVICE static constexpr int position(int row) { return row; }
};

namespace preprocess {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements of a 16-byte load
constexpr float kLog2e = 1.4426950408889634f;

// Neighbouring threads that share a row: the smallest power of two that covers it with one vector per thread.
constexpr int threads_per_row(int head_dim) {
  int threads = 1;
  while (threads * kVector < head_dim) threads *= 2;
  return threads;
}

template <class Element>
CUTE_DEVICE float dot(uint4 const& a, uint4 const& b) {
  using Vector = cutlass::Array<Element, kVector>;
  cutlass::NumericArrayConverter<float, Element, kVector> const to_float;
  auto const x = to_float(reinterpret_cast<Vector const&>(a));
  auto const y = to_float(reinterpret_cast<Vector const&>(b));
  float sum = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < kVector; ++i) sum += x[i] * y[i];
  return sum;
}

// The rows of this CTA's tile, of a dense batch.
struct RowTileRows {
  int head;
  int first;           // in its sequence
  int used;            // rows of the sequence
  int64_t statistic;   // index of the sequence's row 0 among those of the LSE
  int64_t out_offset;  // of the sequence's row 0
  int64_t dout_offset;

  template <int kBlockM>
  CUTE_DEVICE static RowTileRows find(BwdParams const& params) {
    int64_t const batch_head = blockIdx.x / params.m_blocks;
    int64_t const batch = batch_head / params.heads_q, head = batch_head % params.heads_q;
    return {.head = static_cast<int>(head),
            .first = static_cast<int>(blockIdx.x % params.m_blocks) * kBlockM,
            .used = params.len_q,
            .statistic = batch_head * params.lse_rows,
            .out_offset = batch * params.out_strides.batch + head * params.out_strides.head,
            .dout_offset = batch * params.dout_strides.batch + head * params.dout_strides.head};
  }
};

// Of a sequence that is read at run time. `used` is negative where the CTA has no tile.
struct SequenceRows : RowTileRows {
  int all;    // rows of the sequence in dq
  int blind;  // rows before it that see no key
  int64_t dq_offset;
  bool has_key_tiles;

  template <int kBlockM>
  CUTE_DEVICE static SequenceRows find(BwdParams const& params) {
    SequenceRows rows{};
    rows.used = -1;
    ListedRowTile const tile = listed_row_tile(params, blockIdx.x);
    if (!tile.exists) return rows;
    SequenceRecord const record = params.tiles.records[tile.index];
    int const first_row = record.sequence.first_row;
    rows.head = tile.head;
    rows.first = tile.m_block * kBlockM;
    rows.used = record.sequence.len_q;
    rows.statistic = statistic_index(params, tile.index, tile.head, record.sequence, 0);
    rows.out_offset = sequence_offset(params, params.out_strides, tile.index, first_row, tile.head);
    rows.dout_offset = sequence_offset(params, params.dout_strides, tile.index, first_row, tile.head);
    rows.all = record.sequence.rows;
    rows.blind = record.blind_rows;
    rows.dq_offset = sequence_offset(params, params.dq_strides, tile.index, first_row, tile.head);
    rows.has_key_tiles = flash_cute::has_key_tiles(record);
    return rows;
  }
};

// exp(sink - LSE). Where the keys' share of the row is below exp(-69), their weights are 0 to float32 in any case.
CUTE_DEVICE float relative_sink(float sink_log2, float lse_log2) {
  constexpr float kMost = 69.f * kLog2e;
  return exp2f(fminf(sink_log2 - lse_log2, kMost));
}

// The power of two that brings a number from 1 on below 2.
CUTE_DEVICE float dout_scale(float weight) {
  uint32_t const exponent = __float_as_uint(weight) & 0x7f800000u;
  return __uint_as_float((254u << 23) - exponent);
}

template <class Element>
CUTE_DEVICE uint4 scaled(uint4 const& x, float factor) {
  using Vector = cutlass::Array<Element, kVector>;
  auto values = cutlass::NumericArrayConverter<float, Element, kVector>{}(reinterpret_cast<Vector const&>(x));
  CUTE_UNROLL
  for (int i = 0; i < kVector; ++i) values[i] *= factor;
  auto const result = cutlass::NumericArrayConverter<Element, float, kVector>{}(values);
  return reinterpret_cast<uint4 const&>(result);
}

// Stores the statistics of a row at the index `target`; `dot_product`: its rowsum(dO * O), 0 behind the sequence.
// Returns what the row adds to the gradient of its head's sink.
CUTE_DEVICE float store_statistics(BwdParams const& params, RowTileRows const& rows, int row, float dot_product,
                                   float sink_log2, int64_t target) {
  int64_t const source = rows.statistic + row;
  bool const inside = row < rows.used;
  float const lse = inside ? params.lse[source] : -INFINITY;
  float delta = dot_product, lse_log2 = lse * kLog2e, factor = 1.f, sink_part = 0.f;
  if (params.sinks.data != nullptr && lse != -INFINITY) {
    float const e = relative_sink(sink_log2, lse_log2);
    sink_part = e / (1.f + e) * delta;
    factor += e;
    if (params.scaled_dout != nullptr) {
      float const scale = dout_scale(factor);
      delta *= scale;
      factor *= scale;
    }
    lse_log2 += log2f(factor);
  }
  if (inside && params.dlse != nullptr) delta -= params.dlse[source] * factor;
  params.lse_log2[target] = lse == -INFINITY ? INFINITY : lse_log2;
  params.delta[target] = lse == -INFINITY ? 0.f : delta;  // a row that sees no key: 0, even if dO or dLSE is NaN
  return sink_part;
}

// What dO of a row is multiplied by in scaled_dout; negative for a row that sees no key.
CUTE_DEVICE float dout_scale(BwdParams const& params, RowTileRows const& rows, int row, float sink_log2) {
  float const lse = params.lse[rows.statistic + row];
  return lse == -INFINITY ? -1.f : dout_scale(1.f + relative_sink(sink_log2, lse * kLog2e));
}

// Stores a vector of dO times `scale`, see dout_scale. `row`: among those of scaled_dout.
template <class Element>
CUTE_DEVICE void store_scaled_dout(BwdParams const& params, int64_t row, int column, uint4 const& dout, float scale) {
  auto* const target = static_cast<Element*>(params.scaled_dout) + row * params.head_dim_v + column;
  *reinterpret_cast<uint4*>(target) = scale < 0.f ? make_uint4(0, 0, 0, 0) : scaled<Element>(dout, scale);
}

// Zeroes the rows [begin, end) of dQ, counted from the sequence's first row.
template <class Element>
CUTE_DEVICE void zero_rows(BwdParams const& params, SequenceRows const& rows, int begin, int end) {
  int const vectors = params.head_dim / kVector;
  auto* const dq = static_cast<Element*>(params.dq) + rows.dq_offset;
  for (int64_t i = threadIdx.x; i < int64_t{end - begin} * vectors; i += kThreads) {
    int64_t const row = begin + i / vectors;
    *reinterpret_cast<uint4*>(dq + row * params.dq_strides.row + i % vectors * kVector) = make_uint4(0, 0, 0, 0);
  }
}

// The part of this CTA, one of those of the sequence and head, of the rows before the sequence that see no key.
template <class Element, int kBlockM>
CUTE_DEVICE void zero_blind_rows(BwdParams const& params, SequenceRows const& rows) {
  int64_t const tiles = ceil_div(rows.all, kBlockM), tile = rows.first / kBlockM;
  zero_rows<Element>(params, rows, static_cast<int>(rows.blind * tile / tiles) - rows.blind,
                     static_cast<int>(rows.blind * (tile + 1) / tiles) - rows.blind);
}

// Prepares the sums of this CTA's row tile. If its sequence has no key tile, its rows of dQ are 0.
template <class Element, int kBlockM>
CUTE_DEVICE void prepare_sums(BwdParams const& params, SequenceRows const& rows) {
  if (threadIdx.x == 0) params.semaphores[blockIdx.x] = 0;
  if (!rows.has_key_tiles) zero_rows<Element>(params, rows, rows.first, min(rows.first + kBlockM, rows.all));
}

// What comes before the statistics. Returns whether the CTA has a tile.
template <class Element, int kBlockM>
CUTE_DEVICE bool begin_tile(BwdParams const&, RowTileRows const&) {
  return true;
}
template <class Element, int kBlockM>
CUTE_DEVICE bool begin_tile(BwdParams const& params, SequenceRows const& rows) {
  // The queue's slots, and its counts of key tiles, are as many as there might be tiles.
  if (threadIdx.x < 2 && params.dq_queue != nullptr) params.dq_queue[threadIdx.x * gridDim.x + blockIdx.x] = 0;
  if (rows.used < 0) {  // there are fewer tiles than the host has to expect
    if (params.sink_parts != nullptr && threadIdx.x == 0) params.sink_parts[blockIdx.x] = 0.f;
    return false;
  }
  if (rows.blind > 0) zero_blind_rows<Element, kBlockM>(params, rows);
  if (params.dq_queue != nullptr) prepare_sums<Element, kBlockM>(params, rows);
  return true;
}

// Clears what the main kernel counts in.
template <bool kClearSums>
CUTE_DEVICE void clear_counters(BwdParams const& params, RowTileRows const& rows) {
  if (params.semaphores == nullptr || threadIdx.x > 0) return;
  params.semaphores[blockIdx.x] = 0;
  if (blockIdx.x == 0) params.counters[0] = 0;
  if (rows.first == 0) params.counters[1 + blockIdx.x / params.m_blocks] = 0;
}
// The counters are those of DqQueue, which are 0 already. Without sums in memory prepare_sums has cleared the
// semaphore.
template <bool kClearSums>
CUTE_DEVICE void clear_counters(BwdParams const& params, SequenceRows const&) {
  if (kClearSums && params.semaphores != nullptr && threadIdx.x == 0) params.semaphores[blockIdx.x] = 0;
}

// Sums the threads' values into the CTA's part of a sink's gradient, in a fixed order.
CUTE_DEVICE void store_sink_part(BwdParams const& params, float sum) {
  __shared__ float sums[kThreads / 32];
  CUTE_UNROLL
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  float all = 0.f;
  for (float const part : sums) all += part;
  params.sink_parts[blockIdx.x] = all;
}

}  // namespace preprocess

// One CTA per row tile.
template <class Element, int kBlockM, int kHeadDim, class Order, bool kClearSums, bool kSequences>
__global__ void __launch_bounds__(preprocess::kThreads)
    bwd_preprocess_kernel(__grid_constant__ BwdParams const params) {
  using namespace preprocess;
  constexpr int kThreadsPerRow = threads_per_row(kHeadDim);
  constexpr int kRowsAtOnce = kThreads / kThreadsPerRow;
  static_assert(kBlockM % kRowsAtOnce == 0 && kThreadsPerRow <= 32);
  using Rows = std::conditional_t<kSequences, SequenceRows, RowTileRows>;
  Rows const rows = Rows::template find<kBlockM>(params);
  if (!begin_tile<Element, kBlockM>(params, rows)) return;
  int const column = threadIdx.x % kThreadsPerRow * kVector;
  auto const* const out = static_cast<Element const*>(params.out) + rows.out_offset + column;
  auto const* const dout = static_cast<Element const*>(params.dout) + rows.dout_offset + column;
  // All loads are issued first, so that they are in flight together.
  constexpr int kSteps = kBlockM / kRowsAtOnce;
  uint4 o[kSteps], d[kSteps];
  CUTE_UNROLL
  for (int i = 0; i < kSteps; ++i) {
    int const row = rows.first + i * kRowsAtOnce + threadIdx.x / kThreadsPerRow;
    o[i] = d[i] = make_uint4(0, 0, 0, 0);
    if (row < rows.used && column < params.head_dim_v) {
      o[i] = __ldcs(reinterpret_cast<uint4 const*>(out + row * params.out_strides.row));
      d[i] = __ldg(reinterpret_cast<uint4 const*>(dout + row * params.dout_strides.row));
    }
  }
  bool const has_sink = params.sinks.data != nullptr;
  float const sink_log2 = has_sink ? head_sink_log2<Element>(params.sinks, rows.head) : -INFINITY;
  float sink_sum = 0.f;  // of this thread's rows: the sink's share times rowsum(dO * O)
  CUTE_UNROLL
  for (int i = 0; i < kSteps; ++i) {
    int const tile_row = i * kRowsAtOnce + threadIdx.x / kThreadsPerRow;
    int const row = rows.first + tile_row;
    float delta = dot<Element>(o[i], d[i]);
    CUTE_UNROLL
    for (int lane = kThreadsPerRow / 2; lane > 0; lane /= 2) delta += __shfl_xor_sync(0xffffffff, delta, lane);
    if (column == 0) {
      int64_t const target = int64_t{blockIdx.x} * kBlockM + Order::position(tile_row);
      sink_sum += store_statistics(params, rows, row, delta, sink_log2, target);
    }
  }
  if (has_sink) store_sink_part(params, sink_sum);
  if (params.scaled_dout != nullptr) {
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      int const row = rows.first + i * kRowsAtOnce + threadIdx.x / kThreadsPerRow;
      if (row >= rows.used || column >= params.head_dim_v) continue;
      store_scaled_dout<Element>(params, rows.statistic + row, column, d[i], dout_scale(params, rows, row, sink_log2));
    }
  }
  if constexpr (kClearSums) {
    static_assert(kBlockM * kHeadDim % (4 * kThreads) == 0);
    auto* const sums = reinterpret_cast<float4*>(params.dq_acc + int64_t{blockIdx.x} * kBlockM * kHeadDim);
    CUTE_UNROLL
    for (int i = 0; i < kBlockM * kHeadDim / 4 / kThreads; ++i) {
      sums[i * kThreads + threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  clear_counters<kClearSums>(params, rows);
}

// The gradient of a head's sink, from the parts of its row tiles in a fixed order. One CTA per query head.
template <class Element>
__global__ void __launch_bounds__(preprocess::kThreads)
    bwd_sinks_kernel(__grid_constant__ BwdParams const params, int tiles, int batches, int64_t batch_stride) {
  int const head = blockIdx.x;
  float const* const parts = params.sink_parts + int64_t{head} * tiles;
  double sum = 0;
#pragma unroll 4
  for (unsigned i = threadIdx.x; i < unsigned(batches) * tiles; i += preprocess::kThreads) {
    unsigned const batch = i / tiles;
    sum += parts[batch * batch_stride + (i - batch * tiles)];
  }
  __shared__ double sums[preprocess::kThreads];
  sums[threadIdx.x] = sum;
  for (int half = preprocess::kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x > 0) return;
  float const gradient = -static_cast<float>(sums[0]);
  if (params.sinks.is_float32) {
    static_cast<float*>(params.dsinks)[head] = gradient;
  } else {
    static_cast<Element*>(params.dsinks)[head] = static_cast<Element>(gradient);
  }
}

// The main kernel's parameters: its dO may be a scaled one, see above.
inline BwdParams with_scaled_dout(BwdParams params) {
  if (params.scaled_dout == nullptr) return params;
  int64_t const head = int64_t{params.lse_rows} * params.head_dim_v;
  bool const packed = params.sequences.cu_q != nullptr;
  params.dout = params.scaled_dout;
  params.dout_strides = {.batch = packed ? 0 : params.heads_q * head, .head = head, .row = params.head_dim_v};
  return params;
}

// After the preprocess. `sequences`: the main kernel reads sequences at run time. Of a call in parts, each adds up
// those up to its own: the last one leaves the gradient.
template <class Element>
cudaError_t launch_bwd_sinks(BwdParams params, bool sequences, cudaStream_t stream) {
  if (params.sinks.data == nullptr) return cudaSuccess;
  int64_t const stride = int64_t{params.heads_q} * params.m_blocks;
  int const batches = sequences ? params.part + 1 : params.batch;
  params.sink_parts -= params.part * stride;
  bwd_sinks_kernel<Element><<<unsigned(params.heads_q), preprocess::kThreads, 0, stream>>>(params, params.m_blocks,
                                                                                          batches, stride);
  return cudaGetLastError();
}

// `kSequences`: the main kernel reads sequences at run time.
template <class Element, int kBlockM, int kHeadDim, class Order, bool kClearSums, bool kSequences = false>
cudaError_t launch_bwd_preprocess(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  bwd_preprocess_kernel<Element, kBlockM, kHeadDim, Order, kClearSums, kSequences>
      <<<unsigned(plan.row_tiles), preprocess::kThreads, 0, stream>>>(params);
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess ? launch_bwd_sinks<Element>(params, kSequences, stream) : error;
}

}  // namespace flash_cute
