// The traits of the sm80 schedules as data, under the names of the sm80 forward's. Of tiled schedules the operands are
// one column tile.
#pragma once

#include "sm80_forward_rows.h"

#include "studies/schedules/traits.cuh"

namespace inspect::sm80_schedules {

using namespace flash_cute;
using namespace flash_cute::studies::schedules;

// What a mainloop makes of its traits: split_q's, shared_kv's and shared_qkv's.
template <Schedule kSchedule, class Traits>
struct View {
  using MmaS = typename Traits::Mma;
  using MmaO = typename Traits::Mma;
  using SmemLayoutV = typename Traits::SmemLayoutKV;
  using SmemLayoutVt = typename Traits::SmemLayoutVt;
  static constexpr int kColumns = Traits::kHeadDim;
};
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

// Never run: see describe.h.
template <Schedule kSchedule, class Traits>
auto entries() {
  using Element = typename Traits::Element;
  using V = View<kSchedule, Traits>;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kColumns = V::kColumns;
  auto const cQ = make_identity_layout(Shape<Int<kBlockM>, Int<kColumns>>{});
  auto const cK = make_identity_layout(Shape<Int<kBlockN>, Int<kColumns>>{});
  auto const cVt = make_identity_layout(Shape<Int<kColumns>, Int<kBlockN>>{});
  auto const cS = make_identity_layout(Shape<Int<kBlockM>, Int<kBlockN>>{});

  typename Traits::GmemLoad gmem_load;
  typename Traits::GmemStore gmem_store;
  typename V::MmaS mma_s;
  typename V::MmaO mma_o;
  typename Traits::Mma mma;
  auto tSrQ = fragment_a<Element>(mma_s, Shape<Int<kBlockM>, Int<kColumns>>{});   // (MMA, MMA_M, MMA_D)
  auto tSrK = fragment_b<Element>(mma_s, Shape<Int<kBlockN>, Int<kColumns>>{});   // (MMA, MMA_N, MMA_D)
  auto tOrV = fragment_b<Element>(mma_o, Shape<Int<kColumns>, Int<kBlockN>>{});   // (MMA, MMA_D, MMA_N)
  auto tSrS = partition_fragment_C(mma_s, Shape<Int<kBlockM>, Int<kBlockN>>{});   // (MMA, MMA_M, MMA_N)
  auto tOrO = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kColumns>>{});    // (MMA, MMA_M, MMA_D)
  auto rO = make_tensor_like<Element>(tOrO);                                      // (MMA, MMA_M, MMA_D)
  auto const copy_q = make_tiled_copy_A(typename Traits::SmemCopyAtom{}, mma_s);
  auto const copy_k = make_tiled_copy_B(typename Traits::SmemCopyAtom{}, mma_s);
  auto const copy_v = make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, mma_o);
  auto const copy_o = make_tiled_copy_C(Copy_Atom<UniversalCopy<uint32_t>, Element>{}, mma);

  return tuple_cat(
      smem_entry<"Q.smem">(typename Traits::SmemLayoutQ{}), smem_entry<"K.smem">(typename Traits::SmemLayoutKV{}),
      smem_entry<"V.smem">(typename V::SmemLayoutVt{}), smem_entry<"V.rows">(typename V::SmemLayoutV{}),
      copy_entry<"Q.gmem.coord">(gmem_load.tidfrg_D(cQ)), copy_entry<"K.gmem.coord">(gmem_load.tidfrg_D(cK)),
      copy_entry<"O.gmem.coord">(gmem_store.tidfrg_S(cQ)),
      operand_entries<"Q.ldsm.coord", "Q.ldsm.register", "Q.mma.register">(copy_q, tSrQ, cQ),
      operand_entries<"K.ldsm.coord", "K.ldsm.register", "K.mma.register">(copy_k, tSrK, cK),
      operand_entries<"V.ldsm.coord", "V.ldsm.register", "V.mma.register">(copy_v, tOrV, cVt),
      mma_a_entry<"Q.mma.coord">(mma_s, cQ), mma_b_entry<"K.mma.coord">(mma_s, cK),
      mma_b_entry<"V.mma.coord">(mma_o, cVt), mma_c_entry<"S.mma.coord">(mma_s, cS),
      index_entry<"S.mma.register">(tSrS.layout()), mma_a_entry<"P.mma.coord">(mma_o, cS),
      index_entry<"P.mma.register">(operand_a_layout(tSrS.layout())), mma_c_entry<"O.mma.coord">(mma, cQ),
      index_entry<"O.mma.register">(tOrO.layout()), copy_entry<"O.sts.coord">(copy_o.tidfrg_D(cQ)),
      index_entry<"O.sts.register">(copy_o.get_slice(0).retile_S(rO).layout()));
}

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
  Details out;
  AddAll<decltype(entries<kSchedule, Traits>())>::add(out);
  out.buffers = buffers<kSchedule, typename Traits::Storage, Traits>();
  out.facts["element_bytes"] = sizeof(typename Traits::Element);
  out.facts["O.sts.bytes"] = sizeof(uint32_t);
  out.facts["gmem.bytes"] = Traits::kChunk * int(sizeof(typename Traits::Element));
  add_matrices<typename Traits::SmemCopyAtom>(out, "Q.ldsm");
  add_matrices<typename Traits::SmemCopyAtom>(out, "K.ldsm");
  add_matrices<typename Traits::SmemCopyAtomTransposed>(out, "V.ldsm");
  using AtomShape = typename Traits::Mma::AtomShape_MNK;
  out.facts["mma.m"] = size<0>(AtomShape{});
  out.facts["mma.n"] = size<1>(AtomShape{});
  out.facts["mma.k"] = size<2>(AtomShape{});
  return out;
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
