// The sm80 forward for head dims above 256 as data: one tile for all of them, of which the head dim and the chip decide
// at run time what stays in shared memory.
#pragma once

#include "sm80_streaming.h"

#include "sm80/forward/rows/tile.h"
#include "sm80/forward/streamed/tile.h"
#include "sm80/forward/streamed/traits.cuh"

namespace inspect::sm80_forward_streamed {

using namespace sm80_streaming;
namespace kernel = flash_cute::sm80::forward::streamed;

template <int kHeadDim, int kChip>
Details describe() {
  using Storage = typename kernel::Traits<Element, kHeadDim>::Storage;
  Ring const ring = kernel::ring(kHeadDim, kChip);
  Details out = recorded(ring.left_resident);
  out.buffers = {{"P", int(offsetof(Storage, weights)), int(sizeof(Storage::weights))},
                 {"statistics", int(offsetof(Storage, row_max)), int(sizeof(Storage) - offsetof(Storage, row_max))}};
  add_ring(out, ring, num_chunks(kHeadDim), kernel::kFixedBytes, "Q");
  return out;
}

// A CTA of each tile or, where two of them share the columns, the pairs' walks; see
// csrc/sm80/forward/streamed/family.h.
template <int kHeadDim, int kChip>
Array schedule(Problem const& problem, int num_sms) {
  auto const params = params_of<FwdParams>(problem);
  constexpr KernelShape kShape = kernel::kernel_shape(kHeadDim, kChip);
  TileOrder const order = sm80::forward::tile_order(kShape, /*masked=*/true, params.batch, params.heads_q,
                                                    params.heads_kv, params.len_q, params.len_k, kHeadDim);
  bool const pairs_ctas = column_parts(kHeadDim) == 2 && num_sms > 1;
  int const pairs = num_sms / 2;
  Array array{{pairs_ctas ? 12 : 7, int(order.num_tiles())}, {}};
  for (int index = 0; index < order.num_tiles(); ++index) {
    RowTileCoord const tile = order.coord(index);
    TileRange const range = key_range<kBlockM, kBlockN>(params, tile.m_block);
    append(array, tile, range);
    if (pairs_ctas) {
      array.data.insert(array.data.end(), {index % pairs, index / pairs, range.begin, range.end, /*parts=*/0});
    }
  }
  return array;
}

template <int kHeadDim, int kChip>
Kernel entry() {
  constexpr KernelShape kShape = kernel::kernel_shape(kHeadDim, kChip);
  constexpr Ring kRing = kernel::ring(kHeadDim, kChip);
  return {.arch = "sm80",
          .folder = "forward/streamed",
          .entry = kChipNames[kChip],
          .entry_index = kChip,
          .head_dim = kHeadDim,
          .tile = {{"left_resident", kRing.left_resident},
                   {"chunks", num_chunks(kHeadDim)},
                   {"parts", column_parts(kHeadDim)},
                   {"columns", part_columns(kHeadDim)}},
          .shape = shape_of(kShape),
          .facts = {{"block_m", kBlockM},
                    {"block_n", kBlockN},
                    {"threads", kThreads},
                    {"stages", kRing.stages},
                    {"tile_rows", kBlockM},
                    {"other_rows", kBlockN},
                    {"smem_bytes", smem_bytes(kRing, num_chunks(kHeadDim), kernel::kFixedBytes)},
                    {"smem_limit", kMaxSmemBytes[kChip]},
                    {"register_limit", 255},
                    {"ctas_per_tile", column_parts(kHeadDim)}},
          .describe = &describe<kHeadDim, kChip>,
          .schedule = &schedule<kHeadDim, kChip>,
          .masked = &masked<FwdParams, false, ScoreMma<cutlass::half_t>, kThreads, 1, kBlockM, kBlockN>};
}

template <int kHeadDim>
void add(Registry& registry) {
  [&]<int... kChips>(std::integer_sequence<int, kChips...>) {
    (registry.push_back(entry<kHeadDim, kChips>()), ...);
  }(std::make_integer_sequence<int, kNumChips>{});
}

}  // namespace inspect::sm80_forward_streamed
