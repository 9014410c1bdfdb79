// From a plan to the kernels of a backward: two, or above head dim 128 three. Included only by the generated instance
// files.
#pragma once

#include <climits>

#include <cuda_runtime.h>

#include "../../core/bwd_preprocess.cuh"
#include "kernel.cuh"
#include "../bwd_wide/keys.cuh"
#include "../bwd_wide/queries.cuh"
#include "../tensor_map.cuh"

namespace flash_cute::sm90::bwd {

// The tensor maps, their boxes kChunk columns wide and as many rows high as the arguments say; false where one fails.
template <class Traits>
bool encode_maps(KernelArgs& args, int query_rows, int key_rows, int dkv_rows) {
  BwdParams const& params = args.params;
  auto const encode = [&](CUtensorMap* map, void const* data, Strides strides, bool query, int box_rows) {
    int const rows = query ? params.len_q : params.len_k, heads = query ? params.heads_q : params.heads_kv;
    return encode_map<typename Traits::Element>(map, data, strides, params.head_dim, rows, heads, params.batch,
                                                box_rows, Traits::kChunk);
  };
  return encode(&args.q, params.q, params.q_strides, true, query_rows) &&
         encode(&args.dout, params.dout, params.dout_strides, true, query_rows) &&
         (Traits::kHeadDim <= kMaxHeadDimOfOneKernel || encode(&args.dq, params.dq, params.dq_strides, true, 64)) &&
         encode(&args.k, params.k, params.k_strides, false, key_rows) &&
         encode(&args.v, params.v, params.v_strides, false, key_rows) &&
         encode(&args.dk, params.dk, params.dk_strides, false, dkv_rows) &&
         encode(&args.dv, params.dv, params.dv_strides, false, dkv_rows);
}

// A kernel of one CTA an SM.
template <class Kernel>
cudaError_t launch_ctas(Kernel* kernel, int64_t ctas, int threads, int smem_bytes, KernelArgs const& args,
                        cudaStream_t stream) {
  cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<int(ctas), threads, smem_bytes, stream>>>(args);
  return cudaGetLastError();
}

template <class Traits>
cudaError_t launch_kernels(BwdParams const& params, cudaStream_t stream) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr bool kCausal = std::is_same_v<typename Traits::Mask, CausalMask>;
  KernelArgs args{};
  args.params = params;
  args.m_blocks = ceil_div(params.len_q, kBlockM);
  args.n_blocks = ceil_div(params.len_k, kBlockN);
  args.group = params.heads_q / params.heads_kv;
  int64_t const key_tiles = int64_t{args.n_blocks} * params.heads_kv * params.batch;
  int64_t const row_tiles = int64_t{args.m_blocks} * params.heads_q * params.batch;
  if (key_tiles > INT_MAX || row_tiles > INT_MAX) return cudaErrorInvalidConfiguration;
  constexpr int kSmemBytes = smem_bytes(Traits::kTile, kHeadDim);

  cudaError_t error = launch_bwd_preprocess<Element, kBlockM, kHeadDim, StatOrder, false>(params, stream);
  if (error != cudaSuccess) return error;
  if constexpr (kHeadDim > kMaxHeadDimOfOneKernel) {
    if (!encode_maps<Traits>(args, 64, 64, 64)) return cudaErrorInvalidValue;
    error = launch_ctas(bwd_wide::bwd_keys_kernel<Traits>, key_tiles, Traits::kThreads, kSmemBytes, args, stream);
    if (error != cudaSuccess) return error;
    int64_t const query_tiles = int64_t{ceil_div(params.len_q, int{bwd_wide::QueryTile::kRows})} * params.heads_q * params.batch;
    return launch_ctas(bwd_wide::bwd_queries_kernel<Traits>, query_tiles, Traits::kThreads, kSmemBytes, args, stream);
  } else {
    if (!encode_maps<Traits>(args, kBlockM, kBlockN, Traits::kKeys)) return cudaErrorInvalidValue;
    int device = 0, num_sms = 0;
    error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    args.order = task_order(kCausal, params.deterministic, args.m_blocks, args.n_blocks, args.group,
                           int64_t{params.batch} * params.heads_kv, num_sms);
    if (args.order.num_tasks == 0) return cudaErrorInvalidConfiguration;
    int const ctas = min(args.order.num_tasks, num_sms);
    return launch_ctas(bwd_kernel<Traits>, ctas, Traits::kThreads, kSmemBytes, args, stream);
  }
}

template <int kHeadDim, class Variant>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  constexpr TileConfig kTile = tile_config(kHeadDim, std::is_same_v<typename Variant::Mask, CausalMask>, 0);
  auto const launch = [&](auto element) {
    using Element = decltype(element);
    if constexpr (kHeadDim > kMaxHeadDimOfOneKernel) {
      return launch_kernels<bwd_wide::Traits<Element, kHeadDim, Variant, kTile>>(params, stream);
    } else {
      return launch_kernels<Traits<Element, kHeadDim, Variant, kTile>>(params, stream);
    }
  };
  return plan.dtype == DType::kFloat16 ? launch(cutlass::half_t{}) : launch(cutlass::bfloat16_t{});
}

}  // namespace flash_cute::sm90::bwd
