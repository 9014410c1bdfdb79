// The tensor maps of a backward.
#pragma once

#include "contract/plan.h"
#include "contract/variant.h"
#include "sm90/common/sequence_map.cuh"
#include "sm90/common/tensor_map.cuh"
#include "args.cuh"

namespace flash_cute::sm90::backward {

// The boxes of TMA loads. Boxes of TMA stores have 64 rows.
struct MapBoxes {
  int query_rows;
  int key_rows;
  int columns;
  int columns_of_k = columns;
};

template <class Element, Variant kVariant>
cudaError_t encode_maps(KernelArgs& args, MapBoxes const& boxes) {
  BwdParams const& params = args.params;
  bool const packed = params.sequences.cu_q != nullptr;
  int const batch = packed ? 1 : params.batch;
  cudaError_t error = cudaSuccess;
  auto const encode = [&](CUtensorMap* map, void const* data, Strides const& strides, std::array<int, 4> const& sizes,
                          int box_rows, int box_columns) {
    if (error != cudaSuccess) return;
    Box const box{.rows = box_rows, .columns = box_columns};
    error = encode_place_map<Element, kVariant.reads_sequences>(map, data, strides, sizes, packed, box);
  };
  std::array<int, 4> const query{params.head_dim, params.len_q, params.heads_q, batch};
  std::array<int, 4> const query_v{params.head_dim_v, params.len_q, params.heads_q, batch};
  std::array<int, 4> const key{params.head_dim, params.len_k, params.heads_kv, batch};
  std::array<int, 4> const key_v{params.head_dim_v, params.len_k, params.heads_kv, batch};
  encode(&args.q, params.q, params.q_strides, query, boxes.query_rows, boxes.columns);
  encode(&args.dout, params.dout, params.dout_strides, query_v, boxes.query_rows, boxes.columns);
  encode(&args.dq, params.dq, params.dq_strides, query, 64, boxes.columns);
  encode(&args.k, params.k, params.k_strides, key, boxes.key_rows, boxes.columns_of_k);
  encode(&args.v, params.v, params.v_strides, key_v, boxes.key_rows, boxes.columns);
  encode(&args.dk, params.dk, params.dk_strides, key, 64, boxes.columns);
  encode(&args.dv, params.dv, params.dv_strides, key_v, 64, boxes.columns);
  return error;
}

}  // namespace flash_cute::sm90::backward
