// The kernel before the backward's main one: per row the log-sum-exp in base 2 and delta = rowsum(dO * O) - dLSE; it
// also clears the dQ accumulator (where asked) and the counters. Memory-bound: O and dO are read once, the accumulator
// is written once.
#pragma once

#include <cuda_runtime.h>

#include <cute/tensor.hpp>
#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>

#include "../plan.h"

namespace flash_cute {

using namespace cute;

// The index of a row's statistics among those of its row tile.
struct RowOrder {
  CUTE_HOST_DEVICE static constexpr int position(int row) { return row; }
};

namespace preprocess {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements of a 16-byte load

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

}  // namespace preprocess

// One CTA per row tile.
template <class Element, int kBlockM, int kHeadDim, class Order, bool kClearSums>
__global__ void __launch_bounds__(preprocess::kThreads)
    bwd_preprocess_kernel(__grid_constant__ BwdParams const params) {
  using namespace preprocess;
  constexpr int kThreadsPerRow = threads_per_row(kHeadDim);
  constexpr int kRowsAtOnce = kThreads / kThreadsPerRow;
  constexpr float kLog2e = 1.4426950408889634f;
  static_assert(kBlockM % kRowsAtOnce == 0 && kThreadsPerRow <= 32);
  int const m_block = blockIdx.x % params.m_blocks;
  int64_t const batch_head = blockIdx.x / params.m_blocks;
  int64_t const batch = batch_head / params.heads_q, head = batch_head % params.heads_q;
  int const column = threadIdx.x % kThreadsPerRow * kVector;

  auto const* const out = static_cast<Element const*>(params.out) + batch * params.out_strides.batch +
                          head * params.out_strides.head + column;
  auto const* const dout = static_cast<Element const*>(params.dout) + batch * params.dout_strides.batch +
                           head * params.dout_strides.head + column;
  // All loads are issued first, so that they are in flight together.
  constexpr int kSteps = kBlockM / kRowsAtOnce;
  uint4 o[kSteps], d[kSteps];
  CUTE_UNROLL
  for (int i = 0; i < kSteps; ++i) {
    int const row = m_block * kBlockM + i * kRowsAtOnce + threadIdx.x / kThreadsPerRow;
    o[i] = d[i] = make_uint4(0, 0, 0, 0);
    if (row < params.len_q && column < params.head_dim) {
      o[i] = __ldcs(reinterpret_cast<uint4 const*>(out + row * params.out_strides.row));
      d[i] = __ldg(reinterpret_cast<uint4 const*>(dout + row * params.dout_strides.row));
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < kSteps; ++i) {
    int const tile_row = i * kRowsAtOnce + threadIdx.x / kThreadsPerRow;
    int const row = m_block * kBlockM + tile_row;
    bool const inside = row < params.len_q;
    float delta = dot<Element>(o[i], d[i]);
    CUTE_UNROLL
    for (int lane = kThreadsPerRow / 2; lane > 0; lane /= 2) delta += __shfl_xor_sync(0xffffffff, delta, lane);
    if (column == 0) {
      int64_t const source = batch_head * params.len_q + row;
      float const lse = inside ? params.lse[source] : -INFINITY;
      if (inside && params.dlse != nullptr) delta -= params.dlse[source];
      int64_t const target = int64_t{blockIdx.x} * kBlockM + Order::position(tile_row);
      params.lse_log2[target] = lse == -INFINITY ? INFINITY : lse * kLog2e;
      params.delta[target] = lse == -INFINITY ? 0.f : delta;  // a row that sees no key: 0, even if dO or dLSE is NaN
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
  if (params.semaphores != nullptr && threadIdx.x == 0) {
    params.semaphores[blockIdx.x] = 0;
    if (blockIdx.x == 0) params.counters[0] = 0;
    if (m_block == 0) params.counters[1 + batch_head] = 0;
  }
}

template <class Element, int kBlockM, int kHeadDim, class Order, bool kClearSums>
cudaError_t launch_bwd_preprocess(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  bwd_preprocess_kernel<Element, kBlockM, kHeadDim, Order, kClearSums>
      <<<unsigned(plan.row_tiles), preprocess::kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flash_cute
