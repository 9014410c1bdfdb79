// TMA descriptors, encoded on the host.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include <cuda.h>
#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include "contract/params.h"

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
  int slices = 1;  // of the dim behind the rows
};

// Encodes a map whose sizes and byte pitches are given, first those of a column. `promotion`: the bytes that L2 reads
// of memory at once.
template <class Element, int kRank>
cudaError_t encode_map(CUtensorMap* map, void const* data, std::array<uint64_t, kRank> const& sizes,
                       std::array<uint64_t, kRank - 1> const& pitches, Box box,
                       CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  TensorMapEncoder encode = nullptr;
  cudaError_t const error = tensor_map_encoder(encode);
  if (error != cudaSuccess) return error;
  std::array<cuuint64_t, kRank> extents;
  std::array<cuuint64_t, kRank - 1> bytes;
  std::array<cuuint32_t, kRank> extent_of_box, steps;
  std::copy(sizes.begin(), sizes.end(), extents.begin());
  std::copy(pitches.begin(), pitches.end(), bytes.begin());
  extent_of_box.fill(1);
  extent_of_box[0] = box.columns;
  extent_of_box[1] = box.rows;
  extent_of_box[2] = box.slices;
  steps.fill(1);
  auto const type = sizeof(Element) == 1                       ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  int const row_bytes = box.columns * int{sizeof(Element)};
  auto const swizzle = row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                       : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                         : CU_TENSOR_MAP_SWIZZLE_32B;
  CUresult const result = encode(map, type, kRank, const_cast<void*>(data), extents.data(), bytes.data(),
                                 extent_of_box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return cudaSuccess;
  return result == CUDA_ERROR_NOT_INITIALIZED || result == CUDA_ERROR_DEINITIALIZED ? cudaErrorInitializationError
                                                                                    : cudaErrorInvalidValue;
}

// The stride of a dim of size 1 is never used and may be anything: it is replaced by a legal one.
template <class Element>
uint64_t pitch(int size, int64_t stride) {
  return uint64_t(size == 1 ? 16 : stride * int64_t{sizeof(Element)});
}

// Encodes the 4-D map (column, row, head, batch) of a tensor; `sizes` has that order.
template <class Element>
cudaError_t encode_map(CUtensorMap* map, void const* data, Strides strides, std::array<int, 4> const& sizes, Box box) {
  return encode_map<Element, 4>(
      map, data, {uint64_t(sizes[0]), uint64_t(sizes[1]), uint64_t(sizes[2]), uint64_t(sizes[3])},
      {pitch<Element>(sizes[1], strides.row), pitch<Element>(sizes[2], strides.head),
       pitch<Element>(sizes[3], strides.batch)},
      box);
}

}  // namespace flash_cute::sm90
