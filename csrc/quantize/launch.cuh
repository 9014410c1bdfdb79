// The host's side: the tensor's element type and the lanes of a row choose the kernel.
#pragma once

#include "kernel.cuh"

namespace flash_cute::quantize {

template <int kArch, class Element, int kLanes, bool kRotates>
cudaError_t launch_kernel(Params const& params, int num_sms, cudaStream_t stream) {
  cudaError_t error = cudaMemsetAsync(params.ticket, 0, static_cast<size_t>(params.zeroed_bytes), stream);
  if (error != cudaSuccess) return error;
  if (params.cu_seqlens != nullptr) {
    sequences_kernel<kArch><<<1, sequence_prefix::kThreads, 0, stream>>>(params);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  int const ctas = std::clamp(params.task_limit, 1, num_sms * kCtasPerSm<kArch, Element, kLanes, kRotates>);
  quantize_kernel<kArch, Element, kLanes, kRotates><<<ctas, kThreads<kLanes>, 0, stream>>>(params);
  return cudaGetLastError();
}

template <int kArch, class Element, int kLanes>
cudaError_t launch_lanes(Params const& params, int num_sms, cudaStream_t stream) {
  if constexpr (!kServesBoth<Element, kLanes>) {
    if (params.hadamard == 0) return launch_kernel<kArch, Element, kLanes, false>(params, num_sms, stream);
  }
  return launch_kernel<kArch, Element, kLanes, true>(params, num_sms, stream);
}

template <int kArch, class Element>
cudaError_t launch_element(Params const& params, int num_sms, cudaStream_t stream) {
  if constexpr (sizeof(Element) < 4) {
    if (params.head_dim <= 8 * kColumns) return launch_lanes<kArch, Element, 8>(params, num_sms, stream);
    if (params.head_dim <= 16 * kColumns) return launch_lanes<kArch, Element, 16>(params, num_sms, stream);
  }
  return launch_lanes<kArch, Element, 32>(params, num_sms, stream);
}

// kArch: the folder of csrc/ for whose chips the file is compiled.
template <int kArch>
cudaError_t launch(Params const& params, int num_sms, cudaStream_t stream) {
  switch (params.input) {
    case Input::kFloat16: return launch_element<kArch, cutlass::half_t>(params, num_sms, stream);
    case Input::kBFloat16: return launch_element<kArch, cutlass::bfloat16_t>(params, num_sms, stream);
    case Input::kFloat32: return launch_element<kArch, float>(params, num_sms, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flash_cute::quantize
