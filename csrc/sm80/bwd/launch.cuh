// From a plan to the three kernels of a backward. Included only by the generated instance files.
#pragma once

#include <climits>

#include <cuda_runtime.h>

#include "../../core/bwd_preprocess.cuh"
#include "dq.cuh"
#include "kernel.cuh"

namespace flash_cute::sm80::bwd {

// How many heads have their key tiles abreast in launch order.
template <class Traits>
void order_heads(KernelArgs& args, int num_sms) {
  constexpr bool kCausal = std::is_same_v<typename Traits::Mask, CausalMask>;
  BwdParams const& params = args.params;
  int const heads = params.batch * params.heads_kv;
  int64_t const rows = int64_t{args.m_blocks} * Traits::kBlockM * args.group;  // of a key head
  int64_t const bytes = 8 * Traits::kHeadDim * rows;                           // of its Q, dO and sums of dQ
  if (!params.deterministic) {
    // One head after the other. With a mask, as many in the last group as have two tiles for every SM, or its longest
    // would come when others have no more to do; and up to two more as long as L2 holds most of what they read.
    int const two_tiles = ceil_div(2 * num_sms, args.n_blocks);
    int const last_heads = max(two_tiles, int(min(int64_t{two_tiles + 2}, (int64_t{64} << 20) / bytes)));
    args.heads_abreast = 1;
    args.last_first = false;
    args.last_group = max(0, heads - (kCausal ? last_heads : 1));
    return;
  }
  // From the last key tile on, each from its diagonal, where there are few rows and several waves of key tiles: heads
  // of 16,384 rows abreast. Else the next key tile of a head shall start so much later that its turn has come at every
  // row tile: by as many heads as keep Q, dO and the sums of dQ in L2 together, or, with a mask and where few do, more.
  int64_t const waves = int64_t{heads} * args.n_blocks / (num_sms * Traits::kTile.ctas_per_sm);
  args.last_first = kCausal && Traits::kHeadDim > 64 && args.group == 1 && rows <= 3072 && waves >= 8;
  int64_t abreast = max(int64_t{2}, (int64_t{24} << 20) / bytes);
  if (kCausal) {
    int const few = Traits::kHeadDim % 128 == 0 ? min(32, ceil_div(2048, args.n_blocks)) : 32;
    abreast = args.last_first ? ceil_div(int64_t{16384}, rows) : max(int64_t{few}, (int64_t{48} << 20) / bytes);
  }
  // Groups alike: in a last group of few heads every key tile would wait for the one before it.
  args.heads_abreast = ceil_div(heads, ceil_div(heads, int(min(int64_t{heads}, abreast))));
  args.last_group = (heads - 1) / args.heads_abreast;
}

template <class Traits>
cudaError_t launch_kernels(BwdParams const& params, cudaStream_t stream) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  KernelArgs args;
  args.params = params;
  args.m_blocks = ceil_div(params.len_q, kBlockM);
  args.n_blocks = ceil_div(params.len_k, kBlockN);
  args.group = params.heads_q / params.heads_kv;
  order_heads<Traits>(args, num_sms);
  int64_t const key_tiles = int64_t{args.n_blocks} * params.heads_kv * params.batch;
  int64_t const row_tiles = int64_t{args.m_blocks} * params.heads_q * params.batch;
  if (key_tiles > INT_MAX || row_tiles > INT_MAX) return cudaErrorInvalidConfiguration;

  constexpr int kSmemBytes = sizeof(typename Traits::SharedStorage);
  using Element = typename Traits::Element;
  error = launch_bwd_preprocess<Element, kBlockM, Traits::kHeadDim, RowOrder, true>(params, stream);
  if (error != cudaSuccess) return error;
  auto* const kernel = params.deterministic ? bwd_kernel<Traits, true> : bwd_kernel<Traits, false>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  kernel<<<int(key_tiles), Traits::kThreads, kSmemBytes, stream>>>(args);
  bwd_convert_kernel<Traits><<<int(row_tiles), Traits::kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <int kHeadDim, class Variant, int kChip>
cudaError_t launch_on(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  constexpr bool kCausal = std::is_same_v<typename Variant::Mask, CausalMask>;
  constexpr TileConfig kTile = tile_config(kHeadDim, kCausal, kChip);
  static_assert(smem_bytes(kTile, kHeadDim) <= kMaxSmemBytes[kChip]);
  return plan.dtype == DType::kFloat16
             ? launch_kernels<Traits<cutlass::half_t, kHeadDim, Variant, kTile>>(params, stream)
             : launch_kernels<Traits<cutlass::bfloat16_t, kHeadDim, Variant, kTile>>(params, stream);
}

template <int kHeadDim, class Variant>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  switch (plan.config) {
    case kA100: return launch_on<kHeadDim, Variant, kA100>(plan, params, stream);
    case kSmem99K: return launch_on<kHeadDim, Variant, kSmem99K>(plan, params, stream);
    case kH100: return launch_on<kHeadDim, Variant, kH100>(plan, params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash_cute::sm80::bwd
