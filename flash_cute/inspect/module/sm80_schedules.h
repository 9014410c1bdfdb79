// The traits of the sm80 schedules as data, under the names of the sm80 forward's. Of tiled schedules the operands are
// one column tile.
#pragma once

#include "sm80_forward_rows.h"

#include "studies/schedules/traits.cuh"

namespace inspect::sm80_schedules {

using namespace flash_cute;
using namespace flash_cute::studies::schedules;

// What a mainloop makes of its traits: split_q's, shared_kv's and shared_qkv's as the library's own.
template <Schedule kSchedule, class Traits>
struct View : sm80_forward_rows::View<Traits> {};
template <Schedule kSchedule, class Traits>
  requires(divides_keys(kSchedule))
struct View<kSchedule, Traits> {
  using MmaS = typename Traits::MmaS;
  using MmaO = typename Traits::MmaO;
  using SmemLayoutV = typename Traits::SmemLayoutKV;
  using SmemLayoutVt = typename Traits::SmemLayoutVt;
  static constexpr int kColumns = Traits::kHeadDim;
};
template <Schedule kSchedule, class Traits>
  requires(is_tiled(kSchedule))
struct View<kSchedule, Traits> {
  static constexpr int kCount = kSchedule == kTiledQk ? Traits::kTiles : Traits::kStages;
  using MmaS = typename Traits::Mma;
  using MmaO = typename Traits::Mma;
  using SmemLayoutV = typename Traits::template SmemLayoutV<kCount>;
  using SmemLayoutVt = typename Traits::template SmemLayoutVt<kCount>;
  static constexpr int kColumns = Traits::kColumns;
};

template <Schedule kSchedule, class Storage, class Traits>
std::vector<Buffer> buffers() {
  int const q = sizeof(Storage::q);
  if constexpr (kSchedule == kSharedQkv) {
    return {{"Q, then O", 0, q}, {"K", 0, q / 2}, {"V", q / 2, q / 2}};
  } else if constexpr (kSchedule == kSharedKv || kSchedule == kTiledQkv) {
    return {{"Q, then O", 0, q}, {"K, then V", int(offsetof(Storage, kv)), int(sizeof(Storage::kv))}};
  } else if constexpr (divides_keys(kSchedule)) {
    using Keys = typename Traits::Keys;
    int const begin = offsetof(Storage, keys);
    return {{"Q, then O", 0, q},
            {"K", begin + int(offsetof(Keys, k)), int(sizeof(Keys::k))},
            {"V", begin + int(offsetof(Keys, v)), int(sizeof(Keys::v))},
            {"maxima", int(offsetof(Storage, row_parts)), int(sizeof(Storage) - offsetof(Storage, row_parts))}};
  } else {
    return {{"Q, then O", 0, q},
            {"K", int(offsetof(Storage, k)), int(sizeof(Storage::k))},
            {"V", int(offsetof(Storage, v)), int(sizeof(Storage::v))}};
  }
}

template <Schedule kSchedule, class Traits>
Details describe() {
  auto const made = buffers<kSchedule, typename Traits::Storage, Traits>();
  return sm80_forward_rows::describe<Traits, View<kSchedule, Traits>>(made);
}

template <int kHeadDim, Schedule kSchedule>
void add_kernel(Registry& registry) {
  if constexpr (kHeadDim <= max_head_dim(kSchedule)) {
    using Traits = TraitsOf<kSchedule, cutlass::half_t, kHeadDim>;
    using MmaS = typename View<kSchedule, Traits>::MmaS;
    constexpr TileConfig kConfig = tile_config(kSchedule, kHeadDim);
    constexpr sm80::forward::rows::TileConfig kTile = kConfig.tile;
    constexpr Traffic kTraffic = traffic(kSchedule, kHeadDim);
    registry.push_back({.arch = "sm80",
                        .folder = "forward/rows",
                        .entry = kScheduleNames[kSchedule],
                        .entry_index = kSchedule,
                        .head_dim = kHeadDim,
                        .tile = {{"block_m", kTile.block_m},
                                 {"block_n", kTile.block_n},
                                 {"warps", kTile.warps},
                                 {"stages", kTile.stages},
                                 {"q_in_regs", kTile.q_in_regs},
                                 {"budgeted_ctas", kTile.ctas_per_sm},
                                 {"columns", kConfig.columns},
                                 {"out_columns", kConfig.out_columns}},
                        .shape = shape_of(kernel_shape(kSchedule, kHeadDim)),
                        .facts = {{"block_m", Traits::kBlockM},
                                  {"block_n", Traits::kBlockN},
                                  {"threads", Traits::kThreads},
                                  {"stages", Traits::kStages},
                                  {"smem_bytes", int(sizeof(typename Traits::Storage))},
                                  {"bytes_once", kTraffic.once},
                                  {"bytes_per_key_tile", kTraffic.per_key_tile},
                                  {"barriers", barriers(kSchedule, kHeadDim)},
                                  {"parts", column_parts(kSchedule, kHeadDim)},
                                  {"max_head_dim", max_head_dim(kSchedule)}},
                        .describe = &describe<kSchedule, Traits>,
                        .schedule = &sm80_forward_rows::schedule<Traits>,
                        .masked = &masked<FwdParams, false, MmaS, Traits::kThreads, 1, Traits::kBlockM,
                                          Traits::kBlockN>});
  }
}

template <int kHeadDim>
void add(Registry& registry) {
  [&]<int... kSchedules>(std::integer_sequence<int, kSchedules...>) {
    (add_kernel<kHeadDim, Schedule(kSchedules)>(registry), ...);
  }(std::make_integer_sequence<int, kNumSchedules>{});
}

}  // namespace inspect::sm80_schedules
