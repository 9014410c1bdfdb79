// The sm90 forward's traits as data. The partitions are those of sm90/forward/rows/mainloop.cuh and sm90/forward/rows/epilogue.cuh, from the
// same types.
#pragma once

#include "describe.h"
#include "kernel_shape.h"
#include "problem.h"
#include "sm90_forward_packed.h"
#include "sm90_forward_walks.h"
#include "wgmma.h"

#include "sm90/forward/rows/tile.h"
#include "sm90/forward/rows/time.h"
#include "sm90/forward/rows/traits.cuh"

namespace inspect::sm90_forward_rows {

using namespace flash_cute;
using namespace flash_cute::sm90::forward;
using namespace flash_cute::sm90::forward::rows;

// Never run: see describe.h.
template <class Traits>
auto entries() {
  using Element = typename Traits::Element;
  constexpr int kRows = Traits::kRows, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  auto const smem = make_smem_ptr(static_cast<Element*>(nullptr));
  auto sQ = make_tensor(smem, typename Traits::SmemLayoutQ{});    // (64, D)
  auto sK = make_tensor(smem, typename Traits::SmemLayoutK{});    // (BLK_N, D, stage)
  auto sVt = make_tensor(smem, typename Traits::SmemLayoutVt{});  // (D, BLK_N, stage)
  auto const cQ = make_identity_layout(Shape<Int<kRows>, Int<kHeadDim>>{});
  auto const cK = make_identity_layout(Shape<Int<kBlockN>, Int<kHeadDim>>{});
  auto const cVt = make_identity_layout(Shape<Int<kHeadDim>, Int<kBlockN>>{});
  auto const cS = make_identity_layout(Shape<Int<kRows>, Int<kBlockN>>{});

  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  auto tSrQ = mma_qk.get_slice(0).partition_fragment_A(sQ);                          // (MMA, MMA_M, MMA_D)
  auto tSrK = mma_qk.get_slice(0).partition_fragment_B(sK);                          // (MMA, MMA_N, MMA_D, stage)
  auto tOrV = mma_pv.get_slice(0).partition_fragment_B(sVt);                         // (MMA, MMA_D, MMA_N, stage)
  auto tSrS = partition_fragment_C(mma_qk, Shape<Int<kRows>, Int<kBlockN>>{});       // (MMA, MMA_M, MMA_N)
  auto tOrO = partition_fragment_C(mma_pv, Shape<Int<kRows>, Int<kHeadDim>>{});      // (MMA, MMA_M, MMA_D)

  return tuple_cat(
      smem_entry<"Q.smem">(typename Traits::SmemLayoutQ{}), smem_entry<"K.smem">(typename Traits::SmemLayoutK{}),
      smem_entry<"V.smem">(typename Traits::SmemLayoutVt{}),
      // Operands by descriptor: what each step wants, and where its descriptor is, in 16-byte units.
      shared_a_entry<"Q.mma.coord">(mma_qk, cQ), index_entry<"Q.descriptor">(tSrQ.layout()),
      shared_b_entry<"K.mma.coord">(mma_qk, cK), index_entry<"K.descriptor">(tSrK.layout()),
      shared_b_entry<"V.mma.coord">(mma_pv, cVt), index_entry<"V.descriptor">(tOrV.layout()),
      // The accumulators, and S read as the second product's A operand.
      mma_c_entry<"S.mma.coord">(mma_qk, cS), index_entry<"S.mma.register">(tSrS.layout()),
      mma_a_entry<"P.mma.coord">(mma_pv, cS), index_entry<"P.mma.register">(operand_a_layout_64(tSrS.layout())),
      mma_c_entry<"O.mma.coord">(mma_pv, cQ), index_entry<"O.mma.register">(tOrO.layout()));
}

template <class Traits>
Details describe() {
  using SharedStorage = typename Traits::SharedStorage;
  Details out;
  AddAll<decltype(entries<Traits>())>::add(out);

  // Descriptors are made from addresses: of a SharedStorage at address 0.
  using Element = typename Traits::Element;
  auto at = [](size_t offset) { return make_smem_ptr(reinterpret_cast<Element*>(offset)); };
  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  constexpr size_t kQ = offsetof(SharedStorage, q), kK = offsetof(SharedStorage, k), kV = offsetof(SharedStorage, v);
  add_descriptor(out, "Q.descriptor",
                 mma_qk.get_slice(0).partition_fragment_A(make_tensor(at(kQ), typename Traits::SmemLayoutQ{})));
  add_descriptor(out, "K.descriptor",
                 mma_qk.get_slice(0).partition_fragment_B(make_tensor(at(kK), typename Traits::SmemLayoutK{})));
  add_descriptor(out, "V.descriptor",
                 mma_pv.get_slice(0).partition_fragment_B(make_tensor(at(kV), typename Traits::SmemLayoutVt{})));

  out.buffers = {{"K", int(kK), int(sizeof(SharedStorage::k))},
                 {"V", int(kV), int(sizeof(SharedStorage::v))},
                 {"Q", int(kQ), int(sizeof(SharedStorage::q))}};
  if (Traits::kSmem.has_o) out.buffers.push_back({"O", int(offsetof(SharedStorage, out)), int(sizeof(SharedStorage::out))});
  int const barriers = int(offsetof(SharedStorage, k_pipeline));
  out.buffers.push_back({"barriers", barriers, int(sizeof(SharedStorage)) - barriers});

  out.facts["element_bytes"] = sizeof(Element);
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
