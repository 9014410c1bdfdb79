// From a plan to the three kernels of a backward. Included only by the generated instance files.
#pragma once

#include <climits>

#include <cuda_runtime.h>

#include "../core/bwd_preprocess.cuh"
#include "bwd_dq.cuh"
#include "bwd_kernel.cuh"

namespace flash_cute::sm80 {

template <class Traits>
cudaError_t launch_bwd_kernels(BwdParams const& params, cudaStream_t stream) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  BwdArgs args;
  args.params = params;
  args.m_blocks = ceil_div(params.len_q, kBlockM);
  args.n_blocks = ceil_div(params.len_k, kBlockN);
  args.group = params.heads_q / params.heads_kv;
  // In order of turns, the next key tile of a head shall start so much later that its turn has come at every row tile:
  // after this many row tiles of all heads abreast. Of 200 to 4000, this loses the least. Groups alike: in a last
  // group of few heads every key tile would wait for the one before it.
  constexpr int kDistance = std::is_same_v<typename Traits::Mask, CausalMask> ? 2000 : 1000;
  int const heads = params.batch * params.heads_kv;
  // But of few row tiles, more heads abreast than 32 are fewer key tiles at a time that share a head's Q and dO in L2.
  int const groups = ceil_div(heads, min(32, ceil_div(kDistance, args.m_blocks * args.group)));
  args.heads_abreast = params.deterministic ? ceil_div(heads, groups) : 1;
  int64_t const key_tiles = int64_t{args.n_blocks} * params.heads_kv * params.batch;
  int64_t const row_tiles = int64_t{args.m_blocks} * params.heads_q * params.batch;
  if (key_tiles > INT_MAX || row_tiles > INT_MAX) return cudaErrorInvalidConfiguration;

  constexpr int kSmemBytes = sizeof(typename Traits::SharedStorage);
  using Element = typename Traits::Element;
  cudaError_t error = launch_bwd_preprocess<Element, kBlockM, Traits::kHeadDim, RowOrder, true>(params, stream);
  if (error != cudaSuccess) return error;
  // What ends turns late takes registers: up to head dim 128 the default mode is 2 to 4 % faster in a kernel without.
  constexpr bool kEndsLate = Traits::kTile.ends_late, kDefault = kEndsLate && Traits::kHeadDim > 128;
  auto* const kernel = params.deterministic ? bwd_kernel<Traits, kEndsLate> : bwd_kernel<Traits, kDefault>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  kernel<<<int(key_tiles), Traits::kThreads, kSmemBytes, stream>>>(args);
  bwd_convert_kernel<Traits><<<int(row_tiles), Traits::kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <int kHeadDim, class Variant, int kChip>
cudaError_t launch_bwd_on(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  constexpr bool kCausal = std::is_same_v<typename Variant::Mask, CausalMask>;
  constexpr BwdTile kTile = bwd_tile(kHeadDim, kCausal, kChip);
  static_assert(bwd_smem_bytes(kTile, kHeadDim) <= kMaxSmemBytes[kChip]);
  return plan.dtype == DType::kFloat16
             ? launch_bwd_kernels<BwdTraits<cutlass::half_t, kHeadDim, Variant, kTile>>(params, stream)
             : launch_bwd_kernels<BwdTraits<cutlass::bfloat16_t, kHeadDim, Variant, kTile>>(params, stream);
}

template <int kHeadDim, class Variant>
cudaError_t launch_bwd(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  switch (plan.config) {
    case kA100: return launch_bwd_on<kHeadDim, Variant, kA100>(plan, params, stream);
    case kSmem99K: return launch_bwd_on<kHeadDim, Variant, kSmem99K>(plan, params, stream);
    case kH100: return launch_bwd_on<kHeadDim, Variant, kH100>(plan, params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash_cute::sm80
