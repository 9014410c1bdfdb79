// The maps of Q, K and V, from the parameters of a kernel whose CTA owns query rows.
#pragma once

#include <cuda_runtime.h>

#include "contract/params.h"
#include "sm90/common/sequence_map.cuh"
#include "sm90/common/tensor_map.cuh"

namespace flash_cute::sm90::forward {

template <class Traits, class Args>
cudaError_t encode_maps(Args& args) {
  using Element = typename Traits::Element;
  FwdParams const& params = args.params;
  auto const encode = [&](CUtensorMap* map, void const* data, Strides strides, std::array<int, 4> const& sizes,
                          Box box) {
    constexpr bool kReads = Traits::kVariant.reads_sequences;
    return encode_place_map<Element, kReads>(map, data, strides, sizes, params.sequences.cu_q != nullptr, box);
  };
  // Without keys nothing is loaded through the maps of K and V, but they must be valid.
  bool const keys = params.len_k > 0;
  void const* const k = keys ? params.k : params.q;
  void const* const v = keys ? params.v : params.q;
  Strides const k_strides = keys ? params.k_strides : Strides{0, 0, 0};
  Strides const v_strides = keys ? params.v_strides : Strides{0, 0, 0};
  int const len_k = keys ? params.len_k : 1, heads_q = params.heads_q, heads_kv = params.heads_kv, batch = params.batch;
  int const columns = Traits::ColumnsQK::kChunk, columns_v = Traits::ColumnsV::kChunk;
  cudaError_t error = encode(&args.q, params.q, params.q_strides, {params.head_dim, params.len_q, heads_q, batch},
                             {.rows = Traits::kRows, .columns = columns});
  if (error == cudaSuccess) {
    error = encode(&args.k, k, k_strides, {params.head_dim, len_k, heads_kv, batch},
                   {.rows = Traits::kBlockN, .columns = columns});
  }
  if (error == cudaSuccess) {
    error = encode(&args.v, v, v_strides, {params.head_dim_v, len_k, heads_kv, batch},
                   {.rows = Traits::kBlockN, .columns = columns_v});
  }
  return error;
}

}  // namespace flash_cute::sm90::forward
