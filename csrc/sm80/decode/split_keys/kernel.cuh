// Attention over a KV cache for every chip from Ampere on: persistent CTAs of four warps, which load and compute. See
// contract/decode.h for how the work is cut, core/split_keys/consumer.cuh for what the warps do.
#pragma once

#include "core/split_keys/consumer.cuh"
#include "load.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::decode::split_keys {

namespace common = flash_cute::split_keys;

template <class Traits>
__global__ void __launch_bounds__(32 * kConsumerWarps, 1) decode_kernel(__grid_constant__ DecodeParams const params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_raw);
  common::Walk<typename Traits::Cut> walk(params, int(blockIdx.x) / params.heads_kv, int(blockIdx.x) % params.heads_kv);
#pragma unroll 1
  while (true) {
    if (threadIdx.x / 32 == 0) {
      bool const exists = walk.next();
      if (threadIdx.x == 0) smem.unit = exists ? walk.unit() : common::Unit{};
    }
    __syncthreads();
    common::Unit const& unit = smem.unit;
    if (unit.rows == 0) break;
    CpAsyncRing<Traits> ring(params, unit, smem);
    if (rows_of_tile(unit.sequence.len_q * params.group) == kFewRows) {
      common::Consumer<Traits, 1>(params, unit, smem.consumers).run(ring);
    } else {
      common::Consumer<Traits, kConsumerWarps>(params, unit, smem.consumers).run(ring);
    }
    __syncthreads();  // all warps have read the unit, and its tiles
  }
}

}  // namespace flash_cute::sm80::decode::split_keys
