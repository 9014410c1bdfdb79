// The portable forward for head dims above 256: one CTA per row tile of a query head and part of out's columns.
//
// Eight warps. The scores of 64 rows and 128 keys are summed over chunks of 64 columns of the head dim, which pass
// through a ring of stages, so that shared memory does not depend on the head dim; each warp has 32 rows and 32 keys. P
// goes through shared memory, and each warp computes all rows of O for an eighth of the columns, at most 512 of them
// per CTA. Above that, two CTAs share a row tile: half of the O sums fit in an SM's registers, and 32 rows of all of
// them would read K and V from L2 twice as often. Each computes half of the scores, see pair.cuh.
#pragma once

#include "contract/plan.h"
#include "sm80/forward/common/place_tile.cuh"
#include "epilogue.cuh"
#include "mainloop.cuh"

namespace flash_cute::sm80::forward::streamed {

// The pointers to the tile's tensors.
template <class Traits>
CUTE_DEVICE void place_tensors(FwdParams const& params, typename Traits::Storage& smem, int first_column) {
  using Element = typename Traits::Element;
  forward::SequenceTile const& tile = smem.tile;
  int const head_kv = tile.coord.head / (params.heads_q / params.heads_kv);
  auto const head = [&](void const* base, Strides const& strides, int index, int row) {
    return static_cast<Element const*>(base) + tile.coord.batch * strides.batch + index * strides.head +
           row * strides.row;
  };
  smem.q = head(params.q, params.q_strides, tile.coord.head,
                tile.sequence.first_row + tile.coord.m_block * Traits::kBlockM);
  smem.k = head(params.k, params.k_strides, head_kv, tile.sequence.first_key);
  smem.v = head(params.v, params.v_strides, head_kv, tile.sequence.first_key) + first_column;
}

// The row tile in smem.tile.
template <class Traits>
CUTE_DEVICE void compute_tile(FwdParams const& params, typename Traits::Storage& smem, Ring const& ring,
                              typename Traits::Partner& pair) {
  int const thread = threadIdx.x;
  if (thread == 0 && has_mask(params.mask)) {
    forward::SequenceTile& tile = smem.tile;
    TileBits const& lists = params.mask.of_rows;
    tile.keys = listed_range(head_mask(params, tile).key_tiles_of(tile.coord.m_block), lists.words, 1);
  }
  int const part_columns = streaming::part_columns(params.head_dim_v), first_column = pair.part() * part_columns;
  if (thread == 0) place_tensors<Traits>(params, smem, first_column);
  Softmax<Traits>::clear(smem, thread);
  __syncthreads();  // the pointers and the softmax's state are there

  uint32_t const buffers = cast_smem_ptr_to_uint(&smem) + kFixedBytes;
  int const chunks = streaming::num_chunks(params.head_dim);
  Part const part{.left = {.tiles = buffers, .resident = ring.left_resident},
                  .first_column = first_column,
                  .columns = min(part_columns, params.head_dim_v - first_column)};
  typename Traits::OutMma out_mma;
  auto tOrO =
      partition_fragment_C(out_mma, Shape<Int<Traits::kBlockM>, Int<streaming::kColumns>>{});  // (4, 4, kOutBlocks)
  clear(tOrO);
  Softmax<Traits> softmax(params);
  if (smem.tile.keys.begin < smem.tile.keys.end) {
    Turns<Traits::kPaired> const turns(smem.tile.keys, pair.part());
    streaming::Pipeline pipeline(buffers + (ring.left_resident ? chunks * streaming::kLeftBytes : 0), ring);
    Loader<Traits> load(params, smem, turns, ring.left_resident, part.columns);
    if (ring.left_resident) load.load_query(buffers);
    pipeline.start(load);
    mainloop<Traits>(params, smem, pipeline, load, part, softmax, pair, turns, tOrO);
  }
  epilogue<Traits>(params, smem, part, buffers, softmax, pair, tOrO, fresh_thread_index());
}

// Grid: (row tiles, parts of out's columns).
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fwd_streamed_kernel(__grid_constant__ FwdParams const params, __grid_constant__ Ring const ring) {
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::Storage*>(smem_raw);
  forward::place_tile<Traits>(params, smem.tile);
  if (smem.tile.coord.m_block < 0) return;
  Alone alone{static_cast<int>(blockIdx.y)};
  compute_tile<Traits>(params, smem, ring, alone);
}

// The row tiles that there are, at most `most`; those of packed sequences are counted by the kernel before this one.
CUTE_DEVICE int count_tiles(FwdParams const& params, int most) {
  int const* const before = params.sequences.tiles_before;
  return before == nullptr ? most : __ldg(before + sequence_count(params)) * params.heads_q;
}

// Two CTAs per row tile: grid 2 * pairs. Pairs take row tiles in turn, of which there are `most`, of packed sequences
// at most.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fwd_streamed_pair_kernel(__grid_constant__ FwdParams const params, __grid_constant__ Ring const ring, int most) {
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::Storage*>(smem_raw);
  if (threadIdx.x == 0) smem.ticket = atomicAdd(params.ticket, 1);
  __syncthreads();  // the ticket is there
  Pair pair(reinterpret_cast<Message*>(params.parts), params.part_flags, smem.ticket);
  int const tiles = count_tiles(params, most);
#pragma unroll 1
  for (int index = smem.ticket / 2; index < tiles; index += gridDim.x / 2) {
    __syncthreads();  // no thread reads the tile before any more
    forward::place_tile<Traits>(params, smem.tile, index);
    if (smem.tile.coord.m_block >= 0) compute_tile<Traits>(params, smem, ring, pair);
  }
}

}  // namespace flash_cute::sm80::forward::streamed
