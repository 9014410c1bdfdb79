// TMA descriptors, encoded on the host.
#pragma once

#include <type_traits>

#include <cuda.h>
#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include "../params.h"

namespace flash_cute::sm90 {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, found through the runtime so that nothing links to libcuda.
inline TensorMapEncoder tensor_map_encoder() {
  static auto const encoder = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found);
    bool const ok = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return reinterpret_cast<TensorMapEncoder>(ok ? symbol : nullptr);
  }();
  return encoder;
}

// The map (column, row, head, batch) of a tensor, with boxes of `box_rows` x `box_columns`.
template <class Element>
bool encode_map(CUtensorMap* map, void const* data, Strides strides, int head_dim, int rows, int heads, int batch,
                int box_rows, int box_columns) {
  auto const encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  cuuint64_t const sizes[] = {cuuint64_t(head_dim), cuuint64_t(rows), cuuint64_t(heads), cuuint64_t(batch)};
  // A dim of size 1 is never stepped along, and its stride may be anything: give it a legal one.
  auto const bytes = [](int size, int64_t stride) { return cuuint64_t(size == 1 ? 16 : stride * sizeof(Element)); };
  cuuint64_t const pitches[] = {bytes(rows, strides.row), bytes(heads, strides.head), bytes(batch, strides.batch)};
  cuuint32_t const box[] = {cuuint32_t(box_columns), cuuint32_t(box_rows), 1, 1};
  cuuint32_t const steps[] = {1, 1, 1, 1};
  auto const type = std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  auto const swizzle = box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return encode(map, type, 4, const_cast<void*>(data), sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace flash_cute::sm90
