// Where sequences are read at run time, a kernel of its own converts the sums of dQ to 16-bit rows: tasks of a batch
// whose lengths the host does not know cannot tell when all key tiles of a head have been added.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>

#include "../../core/sequence_tiles.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::bwd {

// One CTA per row tile. Rows that are not used, or see no key, get 0.
template <class Traits>
__global__ void __launch_bounds__(Traits::kConsumerThreads) convert_dq_kernel(__grid_constant__ BwdParams const params) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kFours = Traits::kQElements / Traits::kConsumerThreads / 4;
  static_assert(Traits::kConsumerThreads == 256 && Traits::kListedRows == kBlockM);
  ListedRowTile const tile = listed_row_tile(params, blockIdx.x);
  if (!tile.exists) return;
  Sequence const sequence = read_sequence(params, tile.index);
  int const first_row = tile.m_block * kBlockM;
  KeyTiles const visiting = visiting_key_tiles<kBlockM, kBlockN>(sequence, tile.m_block);
  bool const has_sums = visiting.begin < visiting.end && first_row < sequence.len_q;

  // Register 4 * j + r of thread t in store_dq has row 64 * (j / (D / 8)) + 16 * (t / 32) + t % 32 / 4 + 8 * (r / 2) and
  // column 8 * (j % (D / 8)) + 2 * (t % 4) + r % 2. Here each half of the threads has every other j.
  int const thread = threadIdx.x;
  auto const* const sums = reinterpret_cast<float4 const*>(params.dq_acc + int64_t{blockIdx.x} * Traits::kQElements);
  float4 fours[kFours];
  CUTE_UNROLL
  for (int i = 0; i < kFours; ++i) {
    fours[i] = has_sums ? __ldcs(sums + i * Traits::kConsumerThreads + thread) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  int const row = first_row + thread % 128 / 32 * 16 + thread % 32 / 4;
  int const column = thread / 128 * 8 + thread % 4 * 2;
  int64_t const stride = params.dq_strides.row;
  auto* const dq = static_cast<Element*>(params.dq) +
                   sequence_offset(params, params.dq_strides, tile.index, sequence.first_row, tile.head) + row * stride +
                   column;
  CUTE_UNROLL
  for (int i = 0; i < kFours; ++i) {
    int const further_row = 16 * i / kHeadDim * 64, further_column = 16 * i % kHeadDim;
    auto const put = [&](int row_below, float left, float right) {
      int const at = row + row_below;
      if (at >= sequence.rows || column + further_column >= params.head_dim) return;
      bool const used = at < sequence.len_q;
      cutlass::Array<float, 2> const scaled{used ? left * params.scale : 0.f, used ? right * params.scale : 0.f};
      auto const pair = cutlass::NumericArrayConverter<Element, float, 2>{}(scaled);
      *reinterpret_cast<uint32_t*>(dq + row_below * stride + further_column) = reinterpret_cast<uint32_t const&>(pair);
    };
    put(further_row, fours[i].x, fours[i].y);
    put(further_row + 8, fours[i].z, fours[i].w);
  }
}

}  // namespace flash_cute::sm90::bwd
