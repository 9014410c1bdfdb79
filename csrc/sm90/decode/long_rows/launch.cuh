// Launches the kernel of long sequences. Included only by the launch of the kernels of short ones.
#pragma once

#include <algorithm>
#include <bit>
#include <numeric>

#include <cuda_runtime.h>

#include "copy_rows.cuh"
#include "kernel.cuh"
#include "load_float8.cuh"
#include "sm90/common/launch.cuh"
#include "sm90/decode/common/cache_map.cuh"

namespace flash_cute::sm90::decode::long_rows {

constexpr Strides strides_of(CacheStrides const& cache) {
  return {.batch = cache.page, .head = cache.head, .row = cache.row};
}

inline void set_params(Params& params, DecodeParams const& decode) {
  params.q = decode.q;
  params.k = decode.k;
  params.v = decode.v;
  params.out = decode.out;
  params.lse = decode.lse;
  params.q_strides = decode.q_strides;
  params.k_strides = strides_of(decode.k_strides);
  params.v_strides = strides_of(decode.v_strides);
  params.out_strides = decode.out_strides;
  if (decode.cu_q != nullptr) params.out_strides.batch = 0;
  params.batch = decode.batch;
  params.heads_q = decode.heads_q;
  params.heads_kv = decode.heads_kv;
  params.len_q = decode.len_q;
  params.len_k = decode.table.capacity;
  params.head_dim = decode.head_dim;
  params.head_dim_v = decode.head_dim_v;
  params.scale_log2 = decode.scale_log2;
  params.power_scale = power_of_two_from(decode.scale_log2);
  params.tile_heads = 1;
  params.sinks = decode.sinks;
  params.sequences.cu_q = decode.cu_q;
  params.sequences.window_left = decode.window_left;
  params.sequences.window_right = decode.window_right;
  params.sequences.bottom_right = decode.bottom_right;
  params.table = decode.table;
  params.cache_seqlens = decode.cache_seqlens;
  params.new_keys = decode.new_keys;
  params.long_rows = decode.long_rows;
}
inline void set_params(Float8Params& params, DecodeParams const& decode) {
  set_params(static_cast<Params&>(params), decode);
  params.k_is_e5m2 = decode.k_is_e5m2;
  params.v_is_e5m2 = decode.v_is_e5m2;
  params.descale_k = decode.descale_k;
  params.descale_v = decode.descale_v;
}
inline Params params_of(DecodeParams const& decode) {
  Params params{};
  set_params(params, decode);
  return params;
}

// What follows from the sizes of a page and of a key tile. Without pages a key tile is one box.
template <class Args>
void divide_pages(Args& args, int block_n) {
  PageTable const& table = args.params.table;
  int const page_size = std::max<int>(1, table.page_size);
  args.page_size = cutlass::FastDivmod(page_size);
  args.tile_pages = block_n / page_size;
  args.tile_rows = block_n % page_size;
  args.box_bits = std::countr_zero(unsigned(std::gcd(block_n, page_size)));
}
template <class Args>
int box_rows(Args const& args, int block_n) {
  return args.params.table.entries == nullptr ? block_n : args.box_rows();
}

// `Element`: of q and O. `Columns`: of a box of the caches.
template <class KernelTraits, class Element, class Columns>
cudaError_t launch_one(DecodePlan const& plan, DecodeParams const& decode, cudaStream_t stream) {
  using Cache = typename Columns::Element;
  typename Producers<KernelTraits>::Args args{};
  set_params(args.params, decode);
  Params const& params = args.params;
  divide_pages(args, KernelTraits::kBlockN);
  cudaError_t error = encode_sequence_map<Element>(
      &args.q, params.q, params.q_strides, {params.head_dim, params.len_q, params.heads_q, params.batch},
      params.sequences.cu_q != nullptr, {.rows = KernelTraits::kRows, .columns = KernelTraits::ColumnsQK::kChunk});
  if (error != cudaSuccess) return error;
  if constexpr (Producers<KernelTraits>::kByTma) {
    Box const box{.rows = box_rows(args, KernelTraits::kBlockN), .columns = Columns::kChunk};
    error = encode_cache<Cache>(&args.k, decode.k, decode.k_strides, decode, decode.heads_kv, decode.head_dim, box);
    if (error != cudaSuccess) return error;
    error = encode_cache<Cache>(&args.v, decode.v, decode.v_strides, decode, decode.heads_kv, decode.head_dim_v, box);
    if (error != cudaSuccess) return error;
  }
  constexpr int kSmemBytes = sizeof(typename KernelTraits::SharedStorage);
  auto* const kernel = long_rows_kernel<KernelTraits>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  Launch const shape{.ctas = plan.long_ctas, .threads = KernelTraits::kThreads, .smem_bytes = kSmemBytes};
  return sm90::launch(kernel, shape, args, stream);
}

template <class KernelTraits, class Element, class Columns>
cudaError_t launch_kernel(DecodePlan const& plan, DecodeParams const& decode, cudaStream_t stream) {
  constexpr int kRowBytes = KernelTraits::kHeadDim * int{sizeof(typename Columns::Element)};
  bool const copies = copies_rows(decode.table.entries != nullptr, decode.table.page_size, kRowBytes);
  return copies ? launch_one<Copying<KernelTraits>, Element, Columns>(plan, decode, stream)
                : launch_one<KernelTraits, Element, Columns>(plan, decode, stream);
}

template <class Element, int kHeadDim>
cudaError_t launch(DecodePlan const& plan, DecodeParams const& decode, cudaStream_t stream) {
  using Stored = Traits<Element, kHeadDim>;
  if constexpr (has_kernel(kHeadDim, kHeadDim, /*float8_cache=*/true)) {
    using Float8 = Float8Traits<Element, kHeadDim>;
    if (plan.float8_cache) return launch_kernel<Float8, Element, typename Float8::Columns>(plan, decode, stream);
  }
  return launch_kernel<Stored, Element, typename Stored::ColumnsQK>(plan, decode, stream);
}

}  // namespace flash_cute::sm90::decode::long_rows
