// Converts sums of dQ to 16-bit rows where sequences are read at run time, by all consumer threads.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>

#include "dq.cuh"
#include "task.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::bwd {

// Row tiles of a task, in two steps, as DqRows.
template <class Traits>
class SequenceDqRows {
 public:
  static constexpr int kRowTiles = Traits::kBlockM == 64 ? 2 : 1;  // in flight together

  // Loads the first kRowTiles of the task's row tiles from `begin` on.
  CUTE_DEVICE void load(BwdParams const& params, SequenceTask const volatile& task, int begin, int end) {
    CUTE_UNROLL
    for (int t = 0; t < kRowTiles; ++t) {
      CUTE_UNROLL
      for (float4& four : fours_[t]) four = make_float4(0.f, 0.f, 0.f, 0.f);
      if (begin + t >= end) continue;
      int64_t const number = task.dq[begin + t].number;
      float const* const sums = params.dq_acc + number * Traits::kQElements + 4 * consumer_thread();
      CUTE_UNROLL
      for (int i = 0; i < kFours; ++i) {
        float4& four = fours_[t][i];
        asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                     : "l"(sums + i * 4 * Traits::kConsumerThreads)
                     : "memory");
      }
    }
  }

  CUTE_DEVICE void store(BwdParams const& params, SequenceTask const volatile& task, int begin, int end) const {
    CUTE_UNROLL
    for (int t = 0; t < kRowTiles; ++t) {
      if (begin + t < end) store_row_tile(params, task.dq[begin + t], fours_[t]);
    }
  }

 private:
  static constexpr int kFours = Traits::kQElements / Traits::kConsumerThreads / 4;

  // The place of the sums' registers is that of DqRows. Rows that are not used get 0.
  CUTE_DEVICE static void store_row_tile(BwdParams const& params, DqTile const volatile& tile,
                                         float4 const (&fours)[kFours]) {
    using Element = typename Traits::Element;
    int const thread = consumer_thread();
    int const row = tile.row + thread % 128 / 32 * 16 + thread % 32 / 4;
    int const column = thread / 128 * 8 + thread % 4 * 2;
    int const used = tile.used, rows = tile.rows;
    int64_t const stride = params.dq_strides.row;
    auto* const dq = static_cast<Element*>(params.dq) +
                     sequence_offset(params, params.dq_strides, tile.batch, tile.first_row, tile.head) + row * stride +
                     column;
    CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) {
      int const further_row = 16 * i / Traits::kHeadDim * 64, further_column = 16 * i % Traits::kHeadDim;
      auto const put = [&](int row_below, float left, float right) {
        int const at = row + row_below;
        if (at >= rows || column + further_column >= params.head_dim) return;
        bool const is_used = at < used;
        cutlass::Array<float, 2> const scaled{is_used ? left * params.scale : 0.f,
                                              is_used ? right * params.scale : 0.f};
        auto const pair = cutlass::NumericArrayConverter<Element, float, 2>{}(scaled);
        *reinterpret_cast<uint32_t*>(dq + row_below * stride + further_column) =
            reinterpret_cast<uint32_t const&>(pair);
      };
      put(further_row, fours[i].x, fours[i].y);
      put(further_row + 8, fours[i].z, fours[i].w);
    }
  }

  float4 fours_[kRowTiles][kFours];
};

}  // namespace flash_cute::sm90::bwd
