// Launches a plan. Included only by the generated instance files.
#pragma once

#include <algorithm>

#include <cuda_runtime.h>

#include "core/element.cuh"
#include "kernel.cuh"
#include "merge.cuh"
#include "sm90/common/launch.cuh"
#include "sm90/decode/common/cache_map.cuh"
#include "sm90/decode/long_rows/launch.cuh"

namespace flash_cute::sm90::decode::key_chunks {

template <class Element>
cudaError_t encode_queries(CUtensorMap* map, FwdParams const& params, PackedRows const& rows, int columns) {
  bool const packed = params.sequences.cu_q != nullptr;
  Strides const& strides = params.q_strides;
  int const batch = packed ? 1 : params.batch;
  return encode_map<Element, 4>(
      map, params.q,
      {uint64_t(params.head_dim), uint64_t(params.heads_q), uint64_t(params.len_q), uint64_t(batch)},
      {pitch<Element>(params.heads_q, strides.head), pitch<Element>(params.len_q, strides.row),
       pitch<Element>(batch, strides.batch)},
      {.rows = rows.heads, .columns = columns, .slices = rows.positions});
}

// `encode(args, box)` encodes the maps of k and v. The first bytes of the kernel's memory are zeroed before it.
template <class KernelTraits, class Encode>
cudaError_t launch_chunks(KernelArgs& args, int64_t ctas, int64_t zeroed, Encode const& encode,
                          cudaStream_t stream) {
  using Element = typename KernelTraits::Element;
  Params& params = args.params;
  params.divide(KernelTraits::kWarpgroups);
  long_rows::divide_pages(args, KernelTraits::kBlockN);
  int const columns = KernelTraits::ColumnsQK::kChunk;
  cudaError_t error = encode_queries<Element>(&args.q, params, params.rows, columns);
  Box const box{.rows = long_rows::box_rows(args, KernelTraits::kBlockN), .columns = columns};
  if (error == cudaSuccess) error = encode(args, box);
  if (error != cudaSuccess) return error;
  constexpr int kSmemBytes = KernelTraits::kSmem.total;
  auto* const kernel = chunks_kernel<KernelTraits>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  Launch const shape{.ctas = ctas, .threads = KernelTraits::kThreads, .smem_bytes = kSmemBytes};
  return zero_and_launch(params.parts, zeroed, kernel, shape, args, stream);
}

// Where the kernels' memory is, in `workspace`.
template <class Element, int kHeadDim, class Encode>
cudaError_t launch_all(KernelArgs& args, Work const& work, float* workspace, Encode const& encode,
                       cudaStream_t stream) {
  Params& params = args.params;
  params.long_rows = work.long_rows;
  if (work.single_ctas > 0) {
    using Single = Traits<Element, kHeadDim, Chunks::kOfSeveral>;
    params.parts = workspace;
    params.rows = work.single_rows;
    params.slots = work.slots;
    cudaError_t error = launch_chunks<Single>(args, work.single_ctas, 0, encode, stream);
    if (error != cudaSuccess) return error;
    if (work.slots.chunks > 1) {
      error = sm90::launch(merge_kernel<Single>,
                           {.ctas = merge_ctas(params), .threads = 32 * kMergeWarps, .smem_bytes = 0, .early = true},
                           params, stream);
      if (error != cudaSuccess) return error;
    }
  }
  if (work.tile_ctas == 0) return cudaSuccess;
  params.parts = workspace + work.part_floats;
  params.rows = work.tile_rows;
  int64_t const zeroed = work.may_cut ? work.flag_bytes : 0;
  return launch_chunks<Traits<Element, kHeadDim, Chunks::kOfOneCta>>(args, work.tile_ctas, zeroed, encode, stream);
}

template <int kHeadDim>
Work work_of(DecodePlan const& plan, Params const& params) {
  Rows const rows{.batch = params.batch,
                  .heads_q = params.heads_q,
                  .heads_kv = params.heads_kv,
                  .len_q = params.len_q,
                  .packed = params.sequences.cu_q != nullptr,
                  .capacity = params.len_k};
  return Work::of(kHeadDim, rows, plan.long_rows, plan.num_sms);
}

// A batch without a cache: sequence b has page b of keys or, packed, its part of page 0.
template <class Element, int kHeadDim>
cudaError_t launch_forward(DecodePlan const& plan, FwdParams const& forward, cudaStream_t stream) {
  KernelArgs args;
  static_cast<FwdParams&>(args.params) = forward;
  args.params.has_cache = false;
  bool const packed = forward.sequences.cu_q != nullptr;
  int const pages = packed ? 1 : forward.batch;
  args.params.table = {.entries = nullptr,
                       .stride = 0,
                       .pages = forward.len_k > 0 ? pages : 0,
                       .page_size = forward.len_k,
                       .capacity = forward.len_k};
  auto const encode = [&](KernelArgs& to, Box box) {
    auto const encode_one = [&](CUtensorMap* map, void const* data, Strides const& strides, int head_dim) {
      int const rows = std::max(1, forward.len_k), heads = forward.heads_kv;
      return encode_map<Element, 4>(
          map, forward.len_k > 0 ? data : forward.q,
          {uint64_t(head_dim), uint64_t(rows), uint64_t(heads), uint64_t(pages)},
          {pitch<Element>(rows, strides.row), pitch<Element>(heads, strides.head),
           pitch<Element>(pages, strides.batch)},
          box);
    };
    cudaError_t const error = encode_one(&to.k, forward.k, forward.k_strides, forward.head_dim);
    return error != cudaSuccess ? error : encode_one(&to.v, forward.v, forward.v_strides, forward.head_dim_v);
  };
  return launch_all<Element, kHeadDim>(args, work_of<kHeadDim>(plan, args.params), forward.parts, encode, stream);
}

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(DecodePlan const& plan, DecodeParams const& decode, cudaStream_t stream) {
  static_assert(has_kernel(kHeadDim, kHeadDimV));
  return with_element(plan.dtype, [&]<class Element>(Element) {
    if (decode.forward != nullptr) return launch_forward<Element, kHeadDim>(plan, *decode.forward, stream);
    KernelArgs args;
    static_cast<long_rows::Params&>(args.params) = long_rows::params_of(decode);
    args.params.has_cache = true;
    auto const encode = [&decode](KernelArgs& to, Box box) {
      cudaError_t const error =
          encode_cache<Element>(&to.k, decode.k, decode.k_strides, decode, decode.heads_kv, decode.head_dim, box);
      if (error != cudaSuccess) return error;
      return encode_cache<Element>(&to.v, decode.v, decode.v_strides, decode, decode.heads_kv, decode.head_dim_v, box);
    };
    return launch_all<Element, kHeadDim>(args, work_of<kHeadDim>(plan, args.params), decode.parts, encode, stream);
  });
}

}  // namespace flash_cute::sm90::decode::key_chunks
