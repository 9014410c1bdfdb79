// The sm80 backward for head dims above 256 as data: the CTAs that compute dK and dV, or dQ. Their products are the
// forward's, see sm80_streaming.h; those that compute dV alone have a ring of their own.
#pragma once

#include "sm80_streaming.h"

#include "sm80/backward/streamed/tile.h"
#include "sm80/backward/streamed/traits.cuh"

namespace inspect::sm80_backward_streamed {

using namespace sm80_streaming;
namespace kernel = flash_cute::sm80::backward::streamed;

template <int kHeadDim, int kChip>
Details describe() {
  using Storage = typename kernel::Traits<Element, kHeadDim>::Storage;
  Ring const ring = kernel::rings(kHeadDim, kHeadDim, kChip).gradients;
  Details out = recorded(ring.left_resident);
  out.buffers = {{"W", int(offsetof(Storage, weights)), int(sizeof(Storage::weights))},
                 {"statistics", int(offsetof(Storage, lse_log2)), int(sizeof(Storage) - offsetof(Storage, lse_log2))}};
  add_ring(out, ring, kernel::gradient_chunks(kHeadDim, kHeadDim), kernel::kFixedBytes, "this side");
  return out;
}

template <int kHeadDim, int kChip>
Kernel entry() {
  constexpr KernelShape kShape = kernel::kernel_shape(kHeadDim, kHeadDim, kChip);
  constexpr Ring kRing = kernel::rings(kHeadDim, kHeadDim, kChip).gradients;
  return {.arch = "sm80",
          .folder = "backward/streamed",
          .entry = kChipNames[kChip],
          .entry_index = kChip,
          .head_dim = kHeadDim,
          .tile = {{"left_resident", kRing.left_resident},
                   {"chunks", kernel::gradient_chunks(kHeadDim, kHeadDim)},
                   {"parts", column_parts(kHeadDim)},
                   {"columns", part_columns(kHeadDim)}},
          .shape = shape_of(kShape),
          .facts = {{"block_m", kernel::kOtherRows},
                    {"block_n", kernel::kTileRows},
                    {"threads", kernel::Traits<Element, kHeadDim>::kThreads},
                    {"stages", kRing.stages},
                    {"tile_rows", kernel::kTileRows},
                    {"other_rows", kernel::kOtherRows},
                    {"smem_bytes", kernel::smem_bytes(kHeadDim, kHeadDim, kChip)},
                    {"smem_limit", kMaxSmemBytes[kChip]},
                    {"register_limit", 255}},
          .describe = &describe<kHeadDim, kChip>,
          .schedule = nullptr,
          .masked = &masked<BwdParams, true, ScoreMma<cutlass::half_t>, kThreads, 1, kernel::kOtherRows,
                            kernel::kTileRows>};
}

template <int kHeadDim>
void add(Registry& registry) {
  [&]<int... kChips>(std::integer_sequence<int, kChips...>) {
    (registry.push_back(entry<kHeadDim, kChips>()), ...);
  }(std::make_integer_sequence<int, kNumChips>{});
}

}  // namespace inspect::sm80_backward_streamed
