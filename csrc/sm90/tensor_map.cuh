// TMA descriptors, encoded on the host.
#pragma once

#include <array>
#include <atomic>
#include <type_traits>

#include <cuda.h>
#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include "../params.h"

namespace flash_cute::sm90 {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, looked up through the runtime so that nothing links to libcuda. A failed look-up is repeated by
// the next call: the driver may not have been initialised.
inline cudaError_t tensor_map_encoder(TensorMapEncoder& encoder) {
  static std::atomic<void*> found{nullptr};
  void* symbol = found.load(std::memory_order_acquire);
  if (symbol == nullptr) {
    cudaDriverEntryPointQueryResult result;
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) return error;
    if (result != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
    found.store(symbol, std::memory_order_release);
  }
  encoder = reinterpret_cast<TensorMapEncoder>(symbol);
  return cudaSuccess;
}

struct Box {
  int rows;
  int columns;
};

// Encodes the 4-D map (column, row, head, batch) of a tensor; `sizes` has that order.
template <class Element>
cudaError_t encode_map(CUtensorMap* map, void const* data, Strides strides, std::array<int, 4> const& sizes, Box box) {
  TensorMapEncoder encode = nullptr;
  cudaError_t const error = tensor_map_encoder(encode);
  if (error != cudaSuccess) return error;
  // The stride of a dim of size 1 is never used and may be anything: replace it by a legal one.
  auto const bytes = [&](int dim, int64_t stride) {
    return cuuint64_t(sizes[dim] == 1 ? 16 : stride * int64_t{sizeof(Element)});
  };
  cuuint64_t const extents[] = {cuuint64_t(sizes[0]), cuuint64_t(sizes[1]), cuuint64_t(sizes[2]), cuuint64_t(sizes[3])};
  cuuint64_t const pitches[] = {bytes(1, strides.row), bytes(2, strides.head), bytes(3, strides.batch)};
  cuuint32_t const extent_of_box[] = {cuuint32_t(box.columns), cuuint32_t(box.rows), 1, 1};
  cuuint32_t const steps[] = {1, 1, 1, 1};
  auto const type = std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  auto const swizzle = box.columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  CUresult const result = encode(map, type, 4, const_cast<void*>(data), extents, pitches, extent_of_box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return cudaSuccess;
  return result == CUDA_ERROR_NOT_INITIALIZED || result == CUDA_ERROR_DEINITIALIZED ? cudaErrorInitializationError
                                                                                    : cudaErrorInvalidValue;
}

}  // namespace flash_cute::sm90
