// The host's side of the kernels that make a TileMask.
#pragma once

#include <climits>

#include <cuda_runtime.h>

#include "kernel.cuh"
#include "matrix_bits.cuh"
#include "matrix_lists.cuh"
#include "sort.cuh"

namespace flash_cute::masks {

// Launches a kernel that waits for the one before it. Where the architecture has it, it starts before the end of that.
template <int kArch>
cudaError_t launch_behind(void (*kernel)(Params const), int64_t ctas, int threads, Params const& params,
                          cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(ctas));
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = kArch >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

// Of a mask by intervals alone.
template <int kArch>
cudaError_t launch_intervals(Params const& params, int num_sms, cudaStream_t stream) {
  if (params.plan.block_n > 32 * kLaneColumns) return cudaErrorInvalidValue;
  int const words = words_per_cta(params.plan, num_sms);
  tile_mask_kernel<kArch><<<unsigned(ctas(params.plan, words)), kThreads, 0, stream>>>(params, words);
  return cudaGetLastError();
}

template <int kArch>
cudaError_t launch_matrix(Params const& params, cudaStream_t stream) {
  if (params.plan.block_n > kMatrixColumns || params.plan.block_n % kPairColumns != 0) return cudaErrorInvalidValue;
  int64_t const number = matrix_ctas(params);  // 0: there are no keys
  if (number > INT_MAX) return cudaErrorInvalidConfiguration;
  if (number > 0) matrix_bits_kernel<kArch><<<unsigned(number), kMatrixThreads, 0, stream>>>(params);
  cudaError_t const error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return launch_behind<kArch>(matrix_lists_kernel<kArch>, list_ctas(params.plan), kListThreads, params, stream);
}

// kArch: the folder of csrc/ for whose chips the file is compiled.
template <int kArch>
cudaError_t launch(Params const& params, int num_sms, cudaStream_t stream) {
  cudaError_t const error = params.bits != nullptr ? launch_matrix<kArch>(params, stream)
                                                   : launch_intervals<kArch>(params, num_sms, stream);
  if (error != cudaSuccess || params.row_order == nullptr) return error;
  int const heads = params.plan.batches * params.plan.heads;
  return launch_behind<kArch>(sort_row_tiles_kernel<kArch>, heads, kSortThreads, params, stream);
}

}  // namespace flash_cute::masks
