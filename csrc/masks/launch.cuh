// The host's side of the kernels that make a TileMask.
#pragma once

#include <cuda_runtime.h>

#include "kernel.cuh"
#include "sort.cuh"

namespace flash_cute::masks {

// Where the architecture has it, the kernel starts before the end of the one before it.
template <int kArch>
cudaError_t launch_sort(Params const& params, cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(params.plan.batches * params.plan.heads));
  config.blockDim = dim3(kSortThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = kArch >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, sort_row_tiles_kernel<kArch>, params);
}

// kArch: the folder of csrc/ for whose chips the file is compiled.
template <int kArch>
cudaError_t launch(Params const& params, int num_sms, cudaStream_t stream) {
  if (params.plan.block_n > 32 * kLaneColumns) return cudaErrorInvalidValue;
  int const words = words_per_cta(params.plan, num_sms);
  int64_t const number = ctas(params.plan, words);
  tile_mask_kernel<kArch><<<unsigned(number), kThreads, 0, stream>>>(params, words);
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess && params.row_order != nullptr ? launch_sort<kArch>(params, stream) : error;
}

}  // namespace flash_cute::masks
