// V on its way from rows of keys to rows of columns: float8 WGMMA reads both operands along the keys (K-major), while V
// is stored along the columns. Two warps of the producer warpgroup transpose each tile in shared memory.
//
// ldmatrix.trans transposes 16-bit elements: pairs of neighbouring columns of one key. A byte permutation separates the
// two columns, and leaves in one word four keys of a column: of each 16 keys a thread gets
//     2 p, 2 p + 1, 8 + 2 p, 8 + 2 p + 1     (p: its place in the quad)
// which are just those whose scores it has in the accumulator of Q K^T. So the keys stay in this order: P's registers
// are then the A operand as they are, without a shuffle.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/tensor.hpp>

#include "sm90/forward/common/scheduler.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::forward::fp8_rows {

// The byte offset of (row, 16-byte unit) in a buffer of rows of kChunk bytes, as TMA and WGMMA swizzle it.
template <int kChunk>
CUTE_DEVICE unsigned swizzled(unsigned row, unsigned unit) {
  unsigned const offset = row * kChunk + unit * 16;
  return offset ^ ((offset >> 7) % (kChunk / 16) * 16);
}

// Writes the columns of ones behind those of V, in both buffers. By all threads of the CTA.
template <class Traits>
CUTE_DEVICE void write_sum_columns(typename Traits::SharedStorage& smem) {
  using Keys = typename Traits::KeyColumns;
  constexpr int kChunkBytes = Traits::kProduct * Keys::kChunk, kChunks = Keys::kChunks * Traits::kStages;
  constexpr int kWords = Traits::kTile.sum_columns() * Keys::kChunk / 4;  // of ones, at the end of each chunk
#pragma unroll 1
  for (int i = threadIdx.x; i < kWords * kChunks; i += Traits::kThreads) {
    auto* const chunk_end = reinterpret_cast<uint32_t*>(smem.vt[0] + (i / kWords + 1) * kChunkBytes);
    chunk_end[i % kWords - kWords] = Traits::kFourOnes;
  }
}

// Transposes 32 keys of 16 columns: key group `keys` and column group `columns`. By a warp.
template <class Traits>
struct ValueBlock {
  uint32_t words[4];

  CUTE_DEVICE void load(typename Traits::Element const* v, unsigned keys, unsigned columns, unsigned lane) {
    constexpr int kChunk = Traits::ColumnsV::kChunk, kUnits = kChunk / 16;
    auto const* chunk = v + columns / kUnits * (kChunk * Traits::kBlockN);
    auto const* address = chunk + swizzled<kChunk>(keys * 32 + lane, columns % kUnits);  // matrix l / 8, row l % 8
    SM75_U16x8_LDSM_T::copy(*reinterpret_cast<uint128_t const*>(address), words[0], words[1], words[2], words[3]);
  }

  // Lanes of the lower half of the columns keep their even column first, the others their odd one: the eight rows that
  // one step of stmatrix writes are then in different banks.
  CUTE_DEVICE void store(typename Traits::Element* vt, unsigned keys, unsigned columns, unsigned lane) const {
    constexpr int kChunk = Traits::KeyColumns::kChunk, kGroups = kChunk / 32;
    bool const odd_first = lane >= 16;
    unsigned const first = odd_first ? 0x7531 : 0x6420, second = odd_first ? 0x6420 : 0x7531;
    unsigned const pair = lane % 8, matrix = lane / 8;
    unsigned const column = columns * 16 + 2 * pair + ((pair >= 4) != (matrix % 2 == 1));
    constexpr int kPieceBytes = Traits::kProduct * Traits::kBlockN;
    auto* const chunk = vt + column / Traits::kPiece * kPieceBytes + keys / kGroups * (kChunk * Traits::kProduct);
    auto* const address = chunk + swizzled<kChunk>(column % Traits::kPiece, keys % kGroups * 2 + matrix / 2);
    SM90_U32x4_STSM_N::copy(__byte_perm(words[0], words[1], first), __byte_perm(words[0], words[1], second),
                            __byte_perm(words[2], words[3], first), __byte_perm(words[2], words[3], second),
                            *reinterpret_cast<uint128_t*>(address));
  }
};

template <class Traits>
CUTE_DEVICE void transpose_tile(typename Traits::Element const* v, typename Traits::Element* vt, unsigned warp,
                                unsigned lane) {
  constexpr unsigned kKeyGroups = Traits::kBlockN / 32, kBlocks = kKeyGroups * (Traits::kHeadDimV / 16);
  constexpr unsigned kTogether = 4;  // loads in flight
  static_assert(kBlocks % (kTogether * Traits::kTransposers) == 0);
#pragma unroll 1
  for (unsigned first = warp * kTogether; first < kBlocks; first += kTogether * Traits::kTransposers) {
    ValueBlock<Traits> blocks[kTogether];
    CUTE_UNROLL
    for (unsigned i = 0; i < kTogether; ++i) {
      blocks[i].load(v, (first + i) % kKeyGroups, (first + i) / kKeyGroups, lane);
    }
    CUTE_UNROLL
    for (unsigned i = 0; i < kTogether; ++i) {
      blocks[i].store(vt, (first + i) % kKeyGroups, (first + i) / kKeyGroups, lane);
    }
  }
}

// Transposes V of every tile of the CTA. `warp`: of the transposing ones.
template <class Traits>
CUTE_DEVICE void transpose_values(typename Traits::SharedStorage& smem, int warp) {
  unsigned const lane = threadIdx.x % 32;
#pragma unroll 1
  for (int tile_number = 0;; ++tile_number) {
    smem.tile_pipeline.wait_full(at_step(tile_number));  // the tile has been written
    TileCoord const volatile& tile = smem.tile[tile_number & 1];
    bool const exists = tile.m_block >= 0;
    int left = tile.keys.end - tile.keys.begin, count = tile.keys.count;
    if (!exists) break;
    __syncwarp();
    smem.tile_pipeline.release(at_step(tile_number));
#pragma unroll 1
    for (; left > 0; --left, ++count) {
      PipelineState<2> const state = at_step(count);
      smem.v_pipeline.wait_full(state);    // TMA: V has landed
      smem.vt_pipeline.wait_empty(state);  // all consumer warps have finished the products with this stage
      transpose_tile<Traits>(smem.v[state.stage], smem.vt[state.stage], warp, lane);
      tma_store_fence();  // before WGMMA reads what was written, and TMA overwrites what was read
      __syncwarp();
      smem.v_pipeline.release(state);
      smem.vt_pipeline.arrive_full(state);
    }
  }
}

}  // namespace flash_cute::sm90::forward::fp8_rows
