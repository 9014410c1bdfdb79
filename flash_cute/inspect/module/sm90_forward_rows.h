// The sm90 forward's traits as data. The partitions are those of sm90/forward/rows/mainloop.cuh and
// sm90/forward/rows/epilogue.cuh, from the same types.
#pragma once

#include "describe.h"
#include "kernel_shape.h"
#include "problem.h"
#include "sm90_forward_operands.h"
#include "sm90_forward_packed.h"
#include "sm90_forward_walks.h"

#include "sm90/forward/rows/tile.h"
#include "sm90/forward/rows/time.h"
#include "sm90/forward/rows/traits.cuh"

namespace inspect::sm90_forward_rows {

using namespace flash_cute;
using namespace flash_cute::sm90::forward;
using namespace flash_cute::sm90::forward::rows;

template <class Traits>
constexpr sm90_forward::Operands kOperands = {.rows = Traits::kRows,
                                              .keys = Traits::kBlockN,
                                              .columns = Traits::kHeadDim,
                                              .columns_of_v = Traits::kHeadDim,
                                              .keys_of_v = Traits::kBlockN,
                                              .columns_of_out = Traits::kHeadDim};

template <class Traits>
Details describe() {
  using SharedStorage = typename Traits::SharedStorage;
  Details out;
  AddAll<decltype(sm90_forward::entries<Traits, kOperands<Traits>>())>::add(out);

  constexpr size_t kQ = offsetof(SharedStorage, q), kK = offsetof(SharedStorage, k), kV = offsetof(SharedStorage, v);
  sm90_forward::add_descriptors<Traits>(out, kQ, kK, kV);
  out.buffers = {{"K", int(kK), int(sizeof(SharedStorage::k))},
                 {"V", int(kV), int(sizeof(SharedStorage::v))},
                 {"Q", int(kQ), int(sizeof(SharedStorage::q))}};
  if (Traits::kSmem.has_o) {
    out.buffers.push_back({"O", int(offsetof(SharedStorage, out)), int(sizeof(SharedStorage::out))});
  }
  int const barriers = int(offsetof(SharedStorage, k_pipeline));
  out.buffers.push_back({"barriers", barriers, int(sizeof(SharedStorage)) - barriers});

  out.facts["element_bytes"] = sizeof(typename Traits::Element);
  out.facts["box.columns"] = Traits::ColumnsQK::kChunk;
  out.facts["box.count"] = Traits::ColumnsQK::kChunks;
  add_atom<typename Traits::MmaQK::AtomShape_MNK>(out);
  return out;
}

// The layouts depend on neither the element type nor the wait: describe() is compiled once per tile.
template <class Traits>
using Canonical = sm90::forward::rows::Traits<cutlass::half_t, Traits::kHeadDim,
                                    TileConfig{.block_m = Traits::kBlockM,
                                               .block_n = Traits::kBlockN,
                                               .stages = Traits::kStages,
                                               .ping_pong = Traits::kTile.ping_pong,
                                               .late_wait = false}>;
template <class Traits, class Other>
constexpr bool kSameLayouts = std::is_same_v<typename Traits::SmemLayoutQ, typename Other::SmemLayoutQ> &&
                              std::is_same_v<typename Traits::SmemLayoutK, typename Other::SmemLayoutK> &&
                              std::is_same_v<typename Traits::SmemLayoutVt, typename Other::SmemLayoutVt> &&
                              kSameMma<typename Traits::MmaQK, typename Other::MmaQK> &&
                              kSameMma<typename Traits::MmaPV, typename Other::MmaPV> &&
                              sizeof(typename Traits::SharedStorage) == sizeof(typename Other::SharedStorage);

// Where tiles are dealt, those of the last wave are split if the plan's choice splits them.
template <int kHeadDim, int kEntry>
Array schedule(Problem const& problem, int num_sms) {
  constexpr TileConfig kTile = tile_config(kHeadDim, kEntry);
  constexpr KernelShape kShape = kernel_shape(kHeadDim, kEntry);
  auto const params = params_of<FwdParams>(problem);
  Work const call = sm90_forward::work_of(params, kHeadDim, num_sms);
  TileOrder const order = sm90_forward::order_of(params, kShape, params.head_dim, num_sms);
  bool const drawn = is_masked(params.band) && draws_tiles(call, kShape);
  TileSplit split;
  if (!drawn) {
    auto const time = [&](TileSplit const& tried) {
      return predict(call, kShape, speed(kHeadDim, kEntry), 1, tried);
    };
    TileSplit const possible = split_tiles(call, kShape);
    if (possible.tiles > 0 && time(possible) < time({})) split = possible;
  }
  return sm90_forward::walks<kTile.block_m, kTile.block_n>(params, order, drawn, split, num_sms);
}

// Of the tiles that packed batches have a kernel of.
template <int kHeadDim, int kEntry>
constexpr auto packed_schedule_of() -> Array (*)(PackedProblem const&, int) {
  if constexpr (has_kernel(kHeadDim, kHeadDim, kEntry, Variant::kPacked)) {
    constexpr TileConfig kTile = tile_config(kHeadDim, kEntry);
    return &sm90_forward::packed_schedule<kTile.block_m, kTile.block_n>;
  } else {
    return nullptr;
  }
}

template <int kHeadDim, int kEntry>
Kernel kernel() {
  constexpr TileConfig kTile = tile_config(kHeadDim, kEntry);
  using Traits = sm90::forward::rows::Traits<cutlass::half_t, kHeadDim, kTile>;
  using Layouts = Canonical<Traits>;
  static_assert(kSameLayouts<Layouts, Traits>);
  static_assert(kSameLayouts<Layouts, sm90::forward::rows::Traits<cutlass::bfloat16_t, kHeadDim, kTile>>);
  return {.arch = "sm90",
          .folder = "forward/rows",
          .entry = kEntryNames[kEntry],
          .entry_index = kEntry,
          .head_dim = kHeadDim,
          .tile = {{"block_m", kTile.block_m},
                   {"block_n", kTile.block_n},
                   {"stages", kTile.stages},
                   {"ping_pong", kTile.ping_pong},
                   {"late_wait", kTile.late_wait}},
          .shape = shape_of(kernel_shape(kHeadDim, kEntry)),
          .facts = {{"block_m", Traits::kBlockM},
                    {"block_n", Traits::kBlockN},
                    {"threads", Traits::kThreads},
                    {"stages", Traits::kStages},
                    {"smem_bytes", int(sizeof(typename Traits::SharedStorage))},
                    {"smem_limit", 227 * 1024},
                    {"warpgroups", Traits::kWarpgroups},
                    {"warpgroup_rows", Traits::kRows},
                    {"producer_registers", Traits::kProducerRegs},
                    {"consumer_registers", Traits::kConsumerRegs},
                    {"packed", has_kernel(kHeadDim, kHeadDim, kEntry, Variant::kPacked)}},
          .describe = &describe<Layouts>,
          .schedule = &schedule<kHeadDim, kEntry>,
          .masked = &masked<FwdParams, false, typename Traits::MmaQK, 128, Traits::kWarpgroups, Traits::kRows,
                            Traits::kBlockN>,
          .packed_schedule = packed_schedule_of<kHeadDim, kEntry>()};
}

template <int kHeadDim>
void add(Registry& registry) {
  [&]<int... kEntries>(std::integer_sequence<int, kEntries...>) {
    (
        [&] {
          if constexpr (has_entry(kHeadDim, kEntries)) registry.push_back(kernel<kHeadDim, kEntries>());
        }(),
        ...);
  }(std::make_integer_sequence<int, kNumEntries>{});
}

}  // namespace inspect::sm90_forward_rows
