// The host's side of the kernel that makes a TileMask.
#pragma once

#include "kernel.cuh"

namespace flash_cute::masks {

// kArch: the folder of csrc/ for whose chips the file is compiled.
template <int kArch>
cudaError_t launch(Params const& params, int num_sms, cudaStream_t stream) {
  if (params.plan.block_n > 32 * kLaneColumns) return cudaErrorInvalidValue;
  int const words = words_per_cta(params.plan, num_sms);
  int64_t const number = ctas(params.plan, words);
  tile_mask_kernel<kArch><<<unsigned(number), kThreads, 0, stream>>>(params, words);
  return cudaGetLastError();
}

}  // namespace flash_cute::masks
