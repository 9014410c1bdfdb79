// From a plan to the three kernels of a backward. Included only by the generated instance files.
#pragma once

#include <climits>

#include <cuda_runtime.h>

#include "../core/bwd_preprocess.cuh"
#include "bwd_kernel.cuh"
#include "tensor_map.cuh"

namespace flash_cute::sm90 {

template <class Traits>
cudaError_t launch_bwd_kernels(BwdParams const& params, cudaStream_t stream) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  BwdArgs args;
  args.params = params;
  args.m_blocks = ceil_div(params.len_q, kBlockM);
  args.n_blocks = ceil_div(params.len_k, kBlockN);
  args.group = params.heads_q / params.heads_kv;
  // In order: the next key tile of a head shall start so much later that its turn has come at every row tile. Measured
  // with 80 to 400 row tiles: 240 of them, over all heads abreast, lose the least.
  int const row_tiles_to_pass = args.m_blocks * args.group / (std::is_same_v<typename Traits::Mask, CausalMask> ? 2 : 1);
  args.heads_abreast = params.semaphores == nullptr ? 1 : ceil_div(240, max(row_tiles_to_pass, 1));
  int64_t const key_tiles = int64_t{args.n_blocks} * params.heads_kv * params.batch;
  int64_t const row_tiles = int64_t{args.m_blocks} * params.heads_q * params.batch;
  if (key_tiles > INT_MAX || row_tiles > INT_MAX) return cudaErrorInvalidConfiguration;

  auto const encode = [&](CUtensorMap* map, void const* data, Strides strides, bool query, int box_rows) {
    return encode_map<Element>(map, data, strides, params.head_dim, query ? params.len_q : params.len_k,
                               query ? params.heads_q : params.heads_kv, params.batch, box_rows, Traits::kChunk);
  };
  if (!encode(&args.q, params.q, params.q_strides, true, kBlockM) ||
      !encode(&args.dout, params.dout, params.dout_strides, true, kBlockM) ||
      !encode(&args.dq, params.dq, params.dq_strides, true, kBlockM) ||
      !encode(&args.k, params.k, params.k_strides, false, kBlockN) ||
      !encode(&args.v, params.v, params.v_strides, false, kBlockN) ||
      !encode(&args.dk, params.dk, params.dk_strides, false, Traits::kKeys) ||
      !encode(&args.dv, params.dv, params.dv_strides, false, Traits::kKeys)) {
    return cudaErrorInvalidValue;
  }

  constexpr int kSmemBytes = sizeof(typename Traits::SharedStorage);
  cudaError_t error = launch_bwd_preprocess<Element, kBlockM, Traits::kHeadDim, StatOrder>(params, stream);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(bwd_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  bwd_kernel<Traits><<<int(key_tiles), Traits::kThreads, kSmemBytes, stream>>>(args);
  bwd_convert_kernel<Traits><<<int(row_tiles), Traits::kConsumerThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <int kHeadDim, class Variant>
cudaError_t launch_bwd(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  constexpr BwdTile kTile = bwd_tile(kHeadDim, std::is_same_v<typename Variant::Mask, CausalMask>, 0);
  return plan.dtype == DType::kFloat16
             ? launch_bwd_kernels<BwdTraits<cutlass::half_t, kHeadDim, Variant, kTile>>(params, stream)
             : launch_bwd_kernels<BwdTraits<cutlass::bfloat16_t, kHeadDim, Variant, kTile>>(params, stream);
}

}  // namespace flash_cute::sm90
