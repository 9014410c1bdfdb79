// Launches a plan: the preprocess, the backward and dQ's conversion, and where sequences are read at run time before
// them the lists of their tiles. Included only by the generated instance files.
#pragma once

#include "core/bwd_preprocess.cuh"
#include "core/element.cuh"
#include "core/list_sequence_tiles.cuh"
#include "dq.cuh"
#include "kernel.cuh"
#include "masked_kernel.cuh"
#include "sequence_kernel.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

// Of a dense batch, with a mask or without. Traits: of what lies around the kernel.
template <class Traits, int kSmemBytes, class Kernel>
cudaError_t launch_kernels(Kernel* kernel, BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  constexpr bool kClearSums = true;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  error = launch_bwd_preprocess<typename Traits::Element, Traits::kBlockM, Traits::kHeadDim, RowOrder, kClearSums>(
      plan, params, stream);
  if (error != cudaSuccess) return error;
  kernel<<<unsigned(plan.ctas), Traits::kThreads, kSmemBytes, stream>>>(with_scaled_dout(params));
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  bwd_convert_kernel<Traits><<<unsigned(plan.dq_ctas), Traits::kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <class Traits>
cudaError_t launch_dense_kernels(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  constexpr bool kDeterministic = true;
  auto* const kernel = plan.deterministic ? bwd_kernel<Traits, kDeterministic> : bwd_kernel<Traits, !kDeterministic>;
  return launch_kernels<Traits, sizeof(typename Traits::SharedStorage)>(kernel, plan, params, stream);
}

template <class Traits>
cudaError_t launch_masked_kernels(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  constexpr int kSmemBytes = sizeof(typename Traits::SharedStorage);
  return launch_kernels<typename Traits::Base, kSmemBytes>(bwd_masked_kernel<Traits>, plan, params, stream);
}

// The same where sequences are read at run time.
template <class Traits>
cudaError_t launch_sequence_kernels(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  constexpr int kSmemBytes = sizeof(typename Traits::SharedStorage);
  constexpr bool kClearSums = true, kSequences = true;
  auto* const kernel = bwd_sequences_kernel<Traits>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  error = launch_sequence_tiles<Traits::kBlockM, Traits::kBlockN>(params, stream);
  if (error != cudaSuccess) return error;
  error = launch_bwd_preprocess<typename Traits::Element, Traits::kBlockM, Traits::kHeadDim, RowOrder, kClearSums,
                                kSequences>(plan, params, stream);
  if (error != cudaSuccess) return error;
  kernel<<<unsigned(plan.ctas), Traits::kThreads, kSmemBytes, stream>>>(with_scaled_dout(params));
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  bwd_convert_sequences_kernel<Traits><<<unsigned(plan.dq_ctas), Traits::kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

// Any scores of any sequences. The tile has room on every chip.
template <int kHeadDim>
cudaError_t launch_sequences(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  constexpr TileConfig kTile = sequence_tile_config(kHeadDim);
  static_assert(sequence_smem_bytes(kTile, kHeadDim) <= kMaxSmemBytes[kSmem99K]);
  return with_element(plan.dtype, [&]<class Element>(Element) {
    return launch_sequence_kernels<SequenceTraits<Element, kHeadDim, kTile>>(plan, params, stream);
  });
}

// Plain scores of packed batches, where the chip has a kernel for them.
template <int kHeadDim, int kChip>
cudaError_t launch_plain_sequences(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  if constexpr (!has_plain_sequence_kernel(kHeadDim, kChip)) {
    return launch_sequences<kHeadDim>(plan, params, stream);
  } else {
    constexpr TileConfig kTile = plain_sequence_tile_config(kHeadDim, kChip);
    static_assert(sequence_smem_bytes(kTile, kHeadDim) <= kMaxSmemBytes[kChip]);
    return with_element(plan.dtype, [&]<class Element>(Element) {
      return launch_sequence_kernels<PlainSequenceTraits<Element, kHeadDim, kTile>>(plan, params, stream);
    });
  }
}

// A mask by intervals.
template <int kHeadDim>
cudaError_t launch_masked(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  constexpr TileConfig kTile = sequence_tile_config(kHeadDim);
  return with_element(plan.dtype, [&]<class Element>(Element) {
    if constexpr (has_plain_masked_kernel(kHeadDim, kA100)) {
      constexpr TileConfig kPlainTile = plain_masked_tile_config(kHeadDim);
      static_assert(sequence_smem_bytes(kPlainTile, kHeadDim) <= kMaxSmemBytes[kA100]);
      if (!plan.variant.modifies_scores && has_plain_masked_kernel(kHeadDim, plan.entry)) {
        return launch_masked_kernels<PlainMaskedTraits<Element, kHeadDim, kPlainTile>>(plan, params, stream);
      }
    }
    return launch_masked_kernels<MaskedTraits<Element, kHeadDim, kTile>>(plan, params, stream);
  });
}

template <int kHeadDim, int kChip>
cudaError_t launch_entry(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  if (plan.variant == Variant::kPacked) return launch_plain_sequences<kHeadDim, kChip>(plan, params, stream);
  constexpr TileConfig kTile = tile_config(kHeadDim, kChip);
  static_assert(smem_bytes(kTile, kHeadDim) <= kMaxSmemBytes[kChip]);
  return with_element(plan.dtype, [&]<class Element>(Element) {
    return launch_dense_kernels<Traits<Element, kHeadDim, kTile>>(plan, params, stream);
  });
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  static_assert(kHeadDimV == kHeadDim);
  if constexpr (has_masked_kernel(kHeadDim)) {
    if (plan.variant.reads_mask) return launch_masked<kHeadDim>(plan, params, stream);
  }
  if (plan.variant.modifies_scores) return launch_sequences<kHeadDim>(plan, params, stream);
  switch (plan.entry) {
    case kA100: return launch_entry<kHeadDim, kA100>(plan, params, stream);
    case kSmem99K: return launch_entry<kHeadDim, kSmem99K>(plan, params, stream);
    case kH100: return launch_entry<kHeadDim, kH100>(plan, params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
