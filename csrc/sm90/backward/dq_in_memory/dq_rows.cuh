// Converts sums of dQ to 16-bit rows, by all consumer threads.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>

#include "core/registers.cuh"
#include "sm90/backward/common/place.cuh"
#include "task.cuh"
#include "traits.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

// A row tile of dQ in global memory.
template <class Element>
struct DqTarget {
  Element* rows;
  int used;  // rows that have sums, of those from the tile's first one on
  int all;   // rows that are written: those from `used` on get 0
};

// The row tiles of a task's share, in two steps: the work between load and store hides the latency of the loads. A
// share has the row tiles [begin, end), of each its sums (null if no key tile has stored any: dQ is 0) and its target.
template <class Traits>
class DqRows {
 public:
  // Row tiles in flight together: a task's share of dQ where each KV head has one query head.
  static constexpr int kRowTiles = Traits::kDqRowTiles;

  // Loads the first kRowTiles of the row tiles from `begin` on.
  template <class Share>
  CUTE_DEVICE void load(Share const& share, int begin) {
    CUTE_UNROLL
    for (int t = 0; t < kRowTiles; ++t) {
      CUTE_UNROLL
      for (float4& four : fours_[t]) four = make_float4(0.f, 0.f, 0.f, 0.f);
      if (begin + t >= share.end) continue;
      float const* const first = share.sums(begin + t);
      if (first == nullptr) continue;
      float const* const sums = first + 4 * consumer_thread();
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

  template <class Share>
  CUTE_DEVICE void store(BwdParams const& params, Share const& share, int begin) const {
    CUTE_UNROLL
    for (int t = 0; t < kRowTiles; ++t) {
      if (begin + t >= share.end) break;
      auto const target = share.target(begin + t);
      if (target.used < Traits::kBlockM || params.head_dim < Traits::kHeadDim) {
        store_row_tile<Bounds::kClipped>(params, fours_[t], target);
      } else {
        store_row_tile<Bounds::kInside>(params, fours_[t], target);
      }
    }
  }

 private:
  using Element = typename Traits::Element;
  static constexpr int kFours = Traits::kQElements / Traits::kConsumerThreads / 4;

  // Whether all rows and columns of a tile have sums, or some of them must not be stored.
  enum class Bounds { kInside, kClipped };

  template <Bounds kBounds>
  CUTE_DEVICE static void store_row_tile(BwdParams const& params, float4 const (&fours)[kFours],
                                         DqTarget<Element> const& target) {
    // Register 4 * j + r of thread t in store_dq has row 64 * (j / (D / 8)) + 16 * (t / 32) + t % 32 / 4 + 8 * (r / 2)
    // and column 8 * (j % (D / 8)) + 2 * (t % 4) + r % 2. Here each of the two warpgroups has every other j.
    int const thread = consumer_thread();
    int const row = first_row_of_thread(thread);
    int const column = thread / 128 * 8 + thread % 4 * 2;
    int64_t const stride = params.dq_strides.row;
    Element* const dq = target.rows + row * stride + column;
    CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) {
      int const further_row = 16 * i / Traits::kHeadDim * 64, further_column = 16 * i % Traits::kHeadDim;
      auto put = [&](int row_below, float left, float right) {
        if constexpr (kBounds == Bounds::kClipped) {
          if (row + row_below >= target.all || column + further_column >= params.head_dim) return;
          if (row + row_below >= target.used) left = right = 0.f;
        }
        float const factor = params.scale * Traits::kSumsFactor;
        cutlass::Array<float, 2> const scaled{left * factor, right * factor};
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

// A task's share of a dense batch: row tiles among those of all heads.
template <class Traits>
struct DenseDqShare {
  BwdParams const& params;
  int begin;
  int end;

  CUTE_DEVICE float const* sums(int row_tile) const {
    int const m_block = row_tile % params.m_blocks;
    KeyTiles const visiting = visiting_key_tiles<Traits::kBlockM, Traits::kBlockN>(params, m_block);
    return visiting.begin == visiting.end ? nullptr : params.dq_acc + int64_t{row_tile} * Traits::kQElements;
  }

  CUTE_DEVICE DqTarget<typename Traits::Element> target(int row_tile) const {
    int const head = row_tile / params.m_blocks, row = (row_tile - head * params.m_blocks) * Traits::kBlockM;
    int const batch = head / params.heads_q;
    auto* const dq = static_cast<typename Traits::Element*>(params.dq) + batch * params.dq_strides.batch +
                     (head - batch * params.heads_q) * params.dq_strides.head + row * params.dq_strides.row;
    return {.rows = dq, .used = params.len_q - row, .all = params.len_q - row};
  }
};

// Where sequences are read at run time: the row tiles of a chunk.
template <class Traits>
struct SequenceDqShare {
  BwdParams const& params;
  DqChunk const volatile& chunk;
  int begin;
  int end;

  CUTE_DEVICE float const* sums(int row_tile) const {
    int const head = head_of(row_tile), m_block = row_tile - head * chunk.row_tiles;
    if (!is_visited<Traits::kBlockM, Traits::kBlockN>(read_band(chunk.sequence), m_block)) return nullptr;
    int const number =
        sequence_row_tile_index<Traits>(params, chunk.head_kv, chunk.first_row_tile, RowTile{m_block, head});
    return params.dq_acc + int64_t{number} * Traits::kQElements;
  }

  CUTE_DEVICE DqTarget<typename Traits::Element> target(int row_tile) const {
    int const head = head_of(row_tile), row = (row_tile - head * chunk.row_tiles) * Traits::kBlockM;
    int const batch = chunk.batch, first_row = chunk.sequence.first_row;
    auto* const dq = static_cast<typename Traits::Element*>(params.dq) +
                     sequence_offset(params, params.dq_strides, batch, first_row,
                                     chunk.head_kv * params.heads_per_kv + head) +
                     row * params.dq_strides.row;
    return {.rows = dq, .used = chunk.sequence.len_q - row, .all = chunk.sequence.rows - row};
  }

 private:
  CUTE_DEVICE int head_of(int row_tile) const { return row_tile / chunk.row_tiles; }  // of the group
};

}  // namespace flash_cute::sm90::backward::dq_in_memory
