// Kernel and launch of a schedule. Included only by the generated instance files.
#pragma once

#include "schedules.h"
#include "shared_kv.cuh"
#include "shared_qkv.cuh"
#include "split_kv.cuh"
#include "split_q.cuh"
#include "tiled_qk.cuh"
#include "tiled_qkv.cuh"
#include "core/element.cuh"

namespace flash_cute::studies::schedules {

template <Schedule kSchedule>
struct Mainloop;
template <> struct Mainloop<kSplitKv> : SplitKv {};
template <> struct Mainloop<kSplitKv2Stages> : SplitKv {};
template <> struct Mainloop<kSplitQ> : SplitQ {};
template <> struct Mainloop<kSplitQ2Stages> : SplitQ {};
template <> struct Mainloop<kSharedKv> : SharedKv {};
template <> struct Mainloop<kSharedQkv> : SharedQkv {};
template <> struct Mainloop<kTiledQk> : TiledQk {};
template <> struct Mainloop<kTiledQkv> : TiledQkv {};

// The CTAs that share a row tile run side by side, so that its rows and keys are in L2 for both.
template <Schedule kSchedule, class Element, int kHeadDim>
__global__ void __launch_bounds__(32 * tile_config(kSchedule, kHeadDim).tile.warps,
                                  tile_config(kSchedule, kHeadDim).tile.ctas_per_sm)
    schedule_kernel(__grid_constant__ FwdParams const params) {
  using Traits = TraitsOf<kSchedule, Element, kHeadDim>;
  constexpr int kParts = column_parts(kSchedule, kHeadDim);
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::Storage*>(smem_raw);
  RowTileCoord const tile = params.order.coord(blockIdx.x / kParts);
  Mainloop<kSchedule>::template compute_tile<Traits>(params, tile, blockIdx.x % kParts, smem);
}

template <Schedule kSchedule, class Element, int kHeadDim>
cudaError_t launch_kernel(int64_t row_tiles, FwdParams const& params, cudaStream_t stream) {
  constexpr int kSmemBytes = smem_bytes(kSchedule, kHeadDim);
  static_assert(kSmemBytes == sizeof(typename TraitsOf<kSchedule, Element, kHeadDim>::Storage));
  static_assert(kSmemBytes <= kMaxSmemBytes[kSmem99K]);
  auto* const kernel = schedule_kernel<kSchedule, Element, kHeadDim>;
  if constexpr (kSmemBytes > 48 * 1024) {
    cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
    if (error != cudaSuccess) return error;
  }
  constexpr int kThreads = 32 * tile_config(kSchedule, kHeadDim).tile.warps;
  kernel<<<unsigned(row_tiles * column_parts(kSchedule, kHeadDim)), kThreads, kSmemBytes, stream>>>(params);
  return cudaGetLastError();
}

template <Schedule kSchedule, int kHeadDim>
cudaError_t launch(DType dtype, int64_t row_tiles, FwdParams const& params, cudaStream_t stream) {
  return with_element(dtype, [&]<class Element>(Element) {
    return launch_kernel<kSchedule, Element, kHeadDim>(row_tiles, params, stream);
  });
}

}  // namespace flash_cute::studies::schedules
