// Writes new keys and values behind those of a cache. A CTA has a sequence, or a share of its rows; a thread copies 8
// elements of a row at a time, and rounds them if the cache is of float8.
#pragma once

#include <cuda_runtime.h>

#include <cute/tensor.hpp>

#include "append.h"
#include "core/convert.cuh"
#include "core/fp8.cuh"

namespace flash_cute::kvcache {

using namespace cute;

constexpr int kAppendThreads = 256;

// The rows of a sequence in packed tensors. Offsets count as ascending, and are clamped to the rows that there are. By
// all threads of the CTA.
struct RowRange {
  int begin;
  int end;
};
CUTE_DEVICE RowRange rows_of_sequence(AppendParams const& params, int batch) {
  if (params.cu_seqlens == nullptr) return {0, params.rows};
  int begin = 0;
  for (int b = int(threadIdx.x); b <= batch; b += kAppendThreads) begin = max(begin, params.cu_seqlens[b]);
  __shared__ int of_warps[kAppendThreads / 32];
  begin = __reduce_max_sync(0xffffffff, begin);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = begin;
  __syncthreads();
  CUTE_UNROLL
  for (int w = 0; w < kAppendThreads / 32; ++w) begin = max(begin, of_warps[w]);
  begin = min(begin, params.rows);
  return {begin, max(begin, min(params.cu_seqlens[batch + 1], params.rows))};
}

CUTE_DEVICE float descale_of(Descale const& descale, int batch, int head) {
  if (descale.data == nullptr) return 1.f;
  return descale.data[batch * descale.batch_stride + head / descale.heads_per_entry * descale.head_stride];
}

template <bool kBFloat16>
CUTE_DEVICE uint2 to_float8(uint4 const& values, float descale, bool is_e5m2) {
  using Element = std::conditional_t<kBFloat16, cutlass::bfloat16_t, cutlass::half_t>;
  uint32_t const words[4] = {values.x, values.y, values.z, values.w};
  uint32_t pairs[4];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    float2 const pair = unpack<Element>(words[i]);
    pairs[i] = fp8_pair(__fdiv_rn(pair.x, descale), __fdiv_rn(pair.y, descale), is_e5m2);
  }
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// Copies 8 columns of a row.
CUTE_DEVICE void append_chunk(AppendParams const& params, AppendTensor const& tensor, int batch, int head, int from_row,
                              int page, int row, int column) {
  int64_t const of_batch = params.cu_seqlens == nullptr ? batch : 0;
  auto const* const from = static_cast<uint16_t const*>(tensor.from) + of_batch * tensor.from_strides.batch +
                           head * tensor.from_strides.head + from_row * tensor.from_strides.row + column;
  uint4 const values = *reinterpret_cast<uint4 const*>(from);
  CacheStrides const& strides = tensor.to_strides;
  int64_t const to = page * strides.page + head * strides.head + row * strides.row + column;
  if (tensor.type == CacheElement::k16Bit) {
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(tensor.to) + to) = values;
    return;
  }
  float const descale = descale_of(tensor.descale, batch, head);
  bool const is_e5m2 = tensor.type == CacheElement::kE5M2;
  *reinterpret_cast<uint2*>(static_cast<uint8_t*>(tensor.to) + to) =
      params.is_bfloat16 ? to_float8<true>(values, descale, is_e5m2) : to_float8<false>(values, descale, is_e5m2);
}

// kArch: the folder of csrc/ for whose chips the file is compiled.
template <int kArch>
__global__ void __launch_bounds__(kAppendThreads) append_kernel(__grid_constant__ AppendParams const params) {
  int const batch = blockIdx.x;
  RowRange const rows = rows_of_sequence(params, batch);
  int const before = params.cache_seqlens[batch];
  if (before < 0) return;
  int const room = max(0, params.table.capacity - min(before, params.table.capacity));
  int const count = min(room, rows.end - rows.begin);  // the others are dropped
  int const chunks_k = params.k.head_dim / 8, chunks = chunks_k + params.v.head_dim / 8;
  int64_t const total = int64_t{count} * params.heads * chunks;
  for (int64_t i = blockIdx.y * kAppendThreads + threadIdx.x; i < total; i += gridDim.y * kAppendThreads) {
    int const chunk = int(i % chunks), head = int(i / chunks % params.heads), number = int(i / chunks / params.heads);
    int const key = before + number, index = key / params.table.page_size;
    PageTable const& table = params.table;
    int const page = table.entries == nullptr ? batch : table.entries[batch * table.stride + index];
    if (unsigned(page) >= unsigned(params.table.pages)) continue;
    bool const is_k = chunk < chunks_k;
    append_chunk(params, is_k ? params.k : params.v, batch, head, rows.begin + number, page,
                 key - index * params.table.page_size, 8 * (is_k ? chunk : chunk - chunks_k));
  }
}

template <int kArch>
cudaError_t launch_append(AppendParams const& params, cudaStream_t stream) {
  int64_t const chunks = int64_t{params.rows} * params.heads * (params.k.head_dim + params.v.head_dim) / 8;
  int64_t const of_sequence = params.cu_seqlens == nullptr ? chunks : chunks / params.batch;
  constexpr int kChunksOfCta = 4 * kAppendThreads;
  int64_t const ctas = std::clamp<int64_t>((of_sequence + kChunksOfCta - 1) / kChunksOfCta, 1, 256);
  append_kernel<kArch><<<dim3(unsigned(params.batch), unsigned(ctas)), kAppendThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flash_cute::kvcache
