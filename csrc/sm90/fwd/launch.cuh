// From a plan to a launch. Included only by the generated instance files.
#pragma once

#include <climits>

#include <cuda_runtime.h>

#include "kernel.cuh"
#include "../tensor_map.cuh"

namespace flash_cute::sm90::fwd {

template <class Traits>
cudaError_t launch_kernel(FwdParams const& params, cudaStream_t stream) {
  using Element = typename Traits::Element;
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;

  KernelArgs args;
  args.params = params;
  bool const longest_first = std::is_same_v<typename Traits::Mask, CausalMask>;
  args.schedule = TileSchedule::make(params, Traits::kBlockM, longest_first, num_sms);
  if (args.schedule.num_tiles() > INT_MAX) return cudaErrorInvalidConfiguration;

  // Without keys nothing is loaded through K's and V's maps; they only have to be valid.
  bool const keys = params.len_k > 0;
  auto const encode = [&](CUtensorMap* map, void const* data, Strides strides, int rows, int heads, int box_rows) {
    return encode_map<Element>(map, data, strides, params.head_dim, rows, heads, params.batch, box_rows,
                               Traits::kChunk);
  };
  void const* const k = keys ? params.k : params.q;
  void const* const v = keys ? params.v : params.q;
  Strides const k_strides = keys ? params.k_strides : Strides{0, 0, 0};
  Strides const v_strides = keys ? params.v_strides : Strides{0, 0, 0};
  if (!encode(&args.q, params.q, params.q_strides, params.len_q, params.heads_q, Traits::kRows) ||
      !encode(&args.k, k, k_strides, keys ? params.len_k : 1, params.heads_kv, Traits::kBlockN) ||
      !encode(&args.v, v, v_strides, keys ? params.len_k : 1, params.heads_kv, Traits::kBlockN)) {
    return cudaErrorInvalidValue;
  }

  constexpr int kSmemBytes = sizeof(typename Traits::SharedStorage);
  error = cudaFuncSetAttribute(fwd_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  if (params.tile_counter != nullptr) {
    error = cudaMemsetAsync(params.tile_counter, 0, sizeof(int), stream);
    if (error != cudaSuccess) return error;
  }
  TileSplit const& split = params.split;
  if (split.tiles > 0) {
    error = cudaMemsetAsync(params.part_flags, 0, sizeof(int) * part_flags(Traits::kTile, split), stream);
    if (error != cudaSuccess) return error;
  }
  bool const split_alone = split.tiles == args.schedule.num_tiles();
  int const grid = split_alone ? split.ranges : int(std::min<int64_t>(args.schedule.num_tiles(), num_sms));
  fwd_kernel<Traits><<<grid, Traits::kThreads, kSmemBytes, stream>>>(args);
  return cudaGetLastError();
}

template <int kHeadDim, class Variant, int kConfig>
cudaError_t launch_config(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  constexpr TileConfig kTile = tile_config(kHeadDim, std::is_same_v<typename Variant::Mask, CausalMask>, kConfig);
  return plan.dtype == DType::kFloat16
             ? launch_kernel<Traits<cutlass::half_t, kHeadDim, Variant, kTile>>(params, stream)
             : launch_kernel<Traits<cutlass::bfloat16_t, kHeadDim, Variant, kTile>>(params, stream);
}

template <int kHeadDim, class Variant>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  switch (plan.config) {
    case kWide: return launch_config<kHeadDim, Variant, kWide>(plan, params, stream);
    case kOther: return launch_config<kHeadDim, Variant, kOther>(plan, params, stream);
    case kNarrow: return launch_config<kHeadDim, Variant, kNarrow>(plan, params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash_cute::sm90::fwd
