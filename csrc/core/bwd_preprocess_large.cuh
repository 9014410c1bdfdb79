// The backward's preprocess for head dims above 256: what bwd_preprocess.cuh does for each row, by a warp per row.
// There are no sums to clear, and the main kernels read sequences at run time.
#pragma once

#include "bwd_preprocess.cuh"

namespace flash_cute {

// One CTA per row tile.
template <class Element, int kBlockM>
__global__ void __launch_bounds__(preprocess::kThreads)
    bwd_preprocess_large_kernel(__grid_constant__ BwdParams const params) {
  using namespace preprocess;
  constexpr int kWarps = kThreads / 32, kStep = 32 * kVector;
  constexpr int kSteps = kLargestHeadDim / kStep;
  static_assert(kBlockM % kWarps == 0 && kLargestHeadDim % kStep == 0);
  SequenceRows const rows = SequenceRows::find<kBlockM>(params);
  if (rows.used < 0) {  // there are fewer tiles than the host has to expect
    if (params.sink_parts != nullptr && threadIdx.x == 0) params.sink_parts[blockIdx.x] = 0.f;
    return;
  }
  if (rows.blind > 0) zero_blind_rows<Element, kBlockM>(params, rows);
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto const* const out = static_cast<Element const*>(params.out) + rows.out_offset;
  auto const* const dout = static_cast<Element const*>(params.dout) + rows.dout_offset;
  bool const has_sink = params.sinks.data != nullptr;
  float const sink_log2 = has_sink ? head_sink_log2<Element>(params.sinks, rows.head) : -INFINITY;
  float sink_sum = 0.f;  // lane 0: of the warp's rows
#pragma unroll 1
  for (int tile_row = warp; tile_row < kBlockM; tile_row += kWarps) {
    int const row = rows.first + tile_row;
    uint4 o[kSteps], d[kSteps];  // all loads are issued first, so that they are in flight together
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      int const column = i * kStep + lane * kVector;
      o[i] = d[i] = make_uint4(0, 0, 0, 0);
      if (row >= rows.used || column >= params.head_dim_v) continue;
      o[i] = __ldcs(reinterpret_cast<uint4 const*>(out + row * params.out_strides.row + column));
      d[i] = __ldg(reinterpret_cast<uint4 const*>(dout + row * params.dout_strides.row + column));
    }
    float sum = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) sum += dot<Element>(o[i], d[i]);
    CUTE_UNROLL
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    int64_t const target = int64_t{blockIdx.x} * kBlockM + tile_row;
    if (lane == 0) sink_sum += store_statistics(params, rows, row, sum, sink_log2, target);
    if (params.scaled_dout == nullptr || row >= rows.used) continue;
    float const scale = dout_scale(params, rows, row, sink_log2);
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      int const column = i * kStep + lane * kVector;
      if (column < params.head_dim_v) {
        store_scaled_dout<Element>(params, rows.statistic + row, column, d[i], scale);
      }
    }
  }
  if (has_sink) store_sink_part(params, sink_sum);
}

template <class Element, int kBlockM>
cudaError_t launch_bwd_preprocess_large(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  bwd_preprocess_large_kernel<Element, kBlockM>
      <<<unsigned(plan.row_tiles), preprocess::kThreads, 0, stream>>>(params);
  cudaError_t const error = cudaGetLastError();
  constexpr bool kSequences = true;
  return error == cudaSuccess ? launch_bwd_sinks<Element>(params, kSequences, stream) : error;
}

}  // namespace flash_cute
