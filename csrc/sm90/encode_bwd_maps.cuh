// The tensor maps of a backward.
#pragma once

#include "../plan.h"
#include "bwd/args.cuh"
#include "tensor_map.cuh"

namespace flash_cute::sm90 {

// The boxes of TMA loads. Boxes of TMA stores have 64 rows.
struct MapBoxes {
  int query_rows;
  int key_rows;
  int columns;
};

template <class Element>
cudaError_t encode_bwd_maps(bwd::KernelArgs& args, MapBoxes const& boxes) {
  BwdParams const& params = args.params;
  cudaError_t error = cudaSuccess;
  auto const encode_query = [&](CUtensorMap* map, void const* data, Strides const& strides, int box_rows) {
    if (error != cudaSuccess) return;
    error = encode_map<Element>(map, data, strides, {params.head_dim, params.len_q, params.heads_q, params.batch},
                                {.rows = box_rows, .columns = boxes.columns});
  };
  auto const encode_key = [&](CUtensorMap* map, void const* data, Strides const& strides, int box_rows) {
    if (error != cudaSuccess) return;
    error = encode_map<Element>(map, data, strides, {params.head_dim, params.len_k, params.heads_kv, params.batch},
                                {.rows = box_rows, .columns = boxes.columns});
  };
  encode_query(&args.q, params.q, params.q_strides, boxes.query_rows);
  encode_query(&args.dout, params.dout, params.dout_strides, boxes.query_rows);
  encode_query(&args.dq, params.dq, params.dq_strides, 64);
  encode_key(&args.k, params.k, params.k_strides, boxes.key_rows);
  encode_key(&args.v, params.v, params.v_strides, boxes.key_rows);
  encode_key(&args.dk, params.dk, params.dk_strides, 64);
  encode_key(&args.dv, params.dv, params.dv_strides, 64);
  return error;
}

}  // namespace flash_cute::sm90
