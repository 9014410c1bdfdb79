// The sm80 forward's traits as data. The partitions are those of sm80/fwd_mainloop.cuh, load_cp_async.cuh and
// fwd_epilogue.cuh, from the same types.
#pragma once

#include "describe.h"

#include "core/layout.cuh"
#include "core/mask.cuh"
#include "core/scheduler.cuh"
#include "sm80/fwd_traits.cuh"

namespace inspect::sm80 {

using namespace flash_cute;
using namespace flash_cute::sm80;

// One operand: where it lies, how ldmatrix takes it and what the MMA wants of it. Partitions are taken of the
// coordinates: an address is the layout's index there.
template <Name kCoord, Name kRegister, Name kFragment, class Copy, class Fragment, class Identity>
auto operand_entries(Copy const& copy, Fragment& fragment, Identity const& identity) {
  return tuple_cat(copy_entry<kCoord>(copy.tidfrg_S(identity)),
              index_entry<kRegister>(copy.get_slice(0).retile_D(fragment).layout()),  // (CPY, CPY_MN, CPY_K)
              index_entry<kFragment>(fragment.layout()));                             // (MMA, MMA_MN, MMA_K)
}

// Never run: see describe.h.
template <class Traits>
auto entries() {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  auto const smem = make_smem_ptr(static_cast<Element*>(nullptr));
  auto sQ = make_tensor(smem, typename Traits::SmemLayoutQ{});    // (BLK_M, D)
  auto sK = make_tensor(smem, typename Traits::SmemLayoutKV{});   // (BLK_N, D, stage)
  auto sVt = make_tensor(smem, typename Traits::SmemLayoutVt{});  // (D, BLK_N, stage)
  auto sVt_plain = make_tensor(smem, get_nonswizzle_portion(typename Traits::SmemLayoutVt{}));
  auto const cQ = make_identity_layout(Shape<Int<kBlockM>, Int<kHeadDim>>{});
  auto const cK = make_identity_layout(Shape<Int<kBlockN>, Int<kHeadDim>>{});
  auto const cVt = make_identity_layout(Shape<Int<kHeadDim>, Int<kBlockN>>{});
  auto const cS = make_identity_layout(Shape<Int<kBlockM>, Int<kBlockN>>{});

  typename Traits::GmemLoad gmem_load;
  typename Traits::GmemStore gmem_store;
  typename Traits::Mma mma;
  auto const mma_thread = mma.get_slice(0);
  auto tSrQ = mma_thread.partition_fragment_A(sQ);                              // (MMA, MMA_M, MMA_D)
  auto tSrK = mma_thread.partition_fragment_B(sK(_, _, _0{}));                  // (MMA, MMA_N, MMA_D)
  auto tOrV = mma_thread.partition_fragment_B(sVt_plain(_, _, _0{}));           // (MMA, MMA_D, MMA_N)
  auto tSrS = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});   // (MMA, MMA_M, MMA_N)
  auto tOrO = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
  auto rO = make_tensor_like<Element>(tOrO);                                    // (MMA, MMA_M, MMA_D)
  auto const copy_q = make_tiled_copy_A(typename Traits::SmemCopyAtom{}, mma);
  auto const copy_k = make_tiled_copy_B(typename Traits::SmemCopyAtom{}, mma);
  auto const copy_v = make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, mma);
  auto const copy_o = make_tiled_copy_C(Copy_Atom<UniversalCopy<uint32_t>, Element>{}, mma);

  return tuple_cat(
      smem_entry<"Q.smem">(typename Traits::SmemLayoutQ{}), smem_entry<"K.smem">(typename Traits::SmemLayoutKV{}),
      smem_entry<"V.smem">(typename Traits::SmemLayoutVt{}),  // (D, BLK_N, stage), as the MMA takes it
      smem_entry<"V.rows">(typename Traits::SmemLayoutKV{}),  // (BLK_N, D, stage), as it is loaded
      // Global to shared memory, K and V alike, and the output's way back.
      copy_entry<"Q.gmem.coord">(gmem_load.tidfrg_D(cQ)), copy_entry<"K.gmem.coord">(gmem_load.tidfrg_D(cK)),
      copy_entry<"O.gmem.coord">(gmem_store.tidfrg_S(cQ)),
      // Shared memory to registers.
      operand_entries<"Q.ldsm.coord", "Q.ldsm.register", "Q.mma.register">(copy_q, tSrQ, cQ),
      operand_entries<"K.ldsm.coord", "K.ldsm.register", "K.mma.register">(copy_k, tSrK, cK),
      operand_entries<"V.ldsm.coord", "V.ldsm.register", "V.mma.register">(copy_v, tOrV, cVt),
      mma_a_entry<"Q.mma.coord">(mma, cQ), mma_b_entry<"K.mma.coord">(mma, cK), mma_b_entry<"V.mma.coord">(mma, cVt),
      // The accumulators, and S read as the second product's A operand.
      mma_c_entry<"S.mma.coord">(mma, cS), index_entry<"S.mma.register">(tSrS.layout()),
      mma_a_entry<"P.mma.coord">(mma, cS), index_entry<"P.mma.register">(operand_a_layout(tSrS.layout())),
      mma_c_entry<"O.mma.coord">(mma, cQ), index_entry<"O.mma.register">(tOrO.layout()),
      // The output tile, into Q's place.
      copy_entry<"O.sts.coord">(copy_o.tidfrg_D(cQ)),
      index_entry<"O.sts.register">(copy_o.get_slice(0).retile_S(rO).layout()));
}

template <class Traits>
Details describe() {
  using SharedStorage = typename Traits::SharedStorage;
  Details out;
  AddAll<decltype(entries<Traits>())>::add(out);
  out.buffers = {{"Q, then O", int(offsetof(SharedStorage, q)), int(sizeof(SharedStorage::q))},
                 {"K", int(offsetof(SharedStorage, k)), int(sizeof(SharedStorage::k))},
                 {"V", int(offsetof(SharedStorage, v)), int(sizeof(SharedStorage::v))}};
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

// The layouts depend on neither the element type nor the mask: describe() is compiled once a tile.
template <class Traits>
struct CanonicalOf {
  using type = FwdTraits<cutlass::half_t, Traits::kHeadDim, Variant<FullMask>, Traits::kTile>;
  using Bfloat16 =
      FwdTraits<cutlass::bfloat16_t, Traits::kHeadDim, Variant<typename Traits::Mask>, Traits::kTile>;
  template <class Other>
  static constexpr bool kSameAs =
      std::is_same_v<typename type::SmemLayoutQ, typename Other::SmemLayoutQ> &&
      std::is_same_v<typename type::SmemLayoutKV, typename Other::SmemLayoutKV> &&
      std::is_same_v<typename type::SmemLayoutVt, typename Other::SmemLayoutVt> &&
      std::is_same_v<decltype(typename type::Mma{}.get_layoutA_TV()), decltype(typename Other::Mma{}.get_layoutA_TV())> &&
      std::is_same_v<decltype(typename type::Mma{}.get_layoutB_TV()), decltype(typename Other::Mma{}.get_layoutB_TV())> &&
      std::is_same_v<decltype(typename type::Mma{}.get_layoutC_TV()), decltype(typename Other::Mma{}.get_layoutC_TV())> &&
      std::is_same_v<typename type::GmemLoad::TiledLayout_TV, typename Other::GmemLoad::TiledLayout_TV> &&
      sizeof(typename type::SharedStorage) == sizeof(typename Other::SharedStorage);
  static_assert(kSameAs<Traits> && kSameAs<Bfloat16>, "a layout depends on the mask or the element type");
};

template <class Traits>
Array schedule(FwdProblem const& problem, int /*ctas*/) {
  FwdParams const params = params_of(problem);
  auto const scheduler =
      TileScheduler::make(params, Traits::kBlockM, std::is_same_v<typename Traits::Mask, CausalMask>);
  int const tiles = int(scheduler.num_tiles());
  Array array{{5, tiles}, {}};
  for (int index = 0; index < tiles; ++index) {
    TileCoord const tile = scheduler(unsigned(index));
    KeyRange const range = key_range<typename Traits::Mask, Traits::kBlockM, Traits::kBlockN>(params, tile.m_block);
    array.data.insert(array.data.end(), {tile.m_block, tile.head, tile.batch, range.unmasked, range.end});
  }
  return array;
}

template <class Traits>
Array masked(FwdProblem const& problem, int m_block, int n_block) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  FwdParams const params = params_of(problem);
  typename Traits::Mma mma;
  auto const cS = make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{});
  auto const tScS_0 = rowcol_view(mma.get_slice(_0{}).partition_C(cS));
  Array array{{kBlockM, kBlockN}, std::vector<int>(kBlockM * kBlockN)};
  for (int thread = 0; thread < Traits::kThreads; ++thread) {
    auto tSrS = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});
    clear(tSrS);
    auto scores = rowcol_view(tSrS);
    auto const tScS = rowcol_view(mma.get_slice(thread).partition_C(cS));
    apply_mask<typename Traits::Mask>(scores, tScS, tScS_0, params, m_block * kBlockM, n_block * kBlockN);
    for (int i = 0; i < size(scores); ++i) {
      auto const coord = tScS(i);
      array.data[get<0>(coord) + kBlockM * get<1>(coord)] += 1000 + (scores(i) < 0.f);
    }
  }
  return array;
}

template <int kHeadDim, class Mask, int kChip>
Kernel kernel(char const* mask) {
  constexpr FwdTile tile = fwd_tile(kHeadDim, std::is_same_v<Mask, CausalMask>, kChip);
  constexpr KernelShape shape = fwd_shape(kHeadDim, std::is_same_v<Mask, CausalMask>, kChip);
  using Traits = FwdTraits<cutlass::half_t, kHeadDim, Variant<Mask>, tile>;
  return {.arch = "sm80",
          .mask = mask,
          .config = enumerator_name<Chip(kChip)>(),
          .config_index = kChip,
          .head_dim = kHeadDim,
          .tile = {{"block_m", tile.block_m},
                   {"block_n", tile.block_n},
                   {"warps", tile.warps},
                   {"stages", tile.stages},
                   {"q_in_regs", tile.q_in_regs},
                   {"ctas_per_sm", tile.ctas_per_sm}},
          .shape = {{"block_m", shape.block_m},
                    {"block_n", shape.block_n},
                    {"threads", shape.threads},
                    {"stages", shape.stages},
                    {"smem_bytes", shape.smem_bytes},
                    {"ctas_per_sm", shape.ctas_per_sm}},
          .facts = {{"block_m", Traits::kBlockM},
                    {"block_n", Traits::kBlockN},
                    {"threads", Traits::kThreads},
                    {"stages", Traits::kStages},
                    {"smem_bytes", int(sizeof(typename Traits::SharedStorage))},
                    {"smem_limit", kMaxSmemBytes[kChip]},
                    {"register_limit", std::min(255, 65536 / (Traits::kThreads * tile.ctas_per_sm) / 8 * 8)}},
          .describe = &describe<typename CanonicalOf<Traits>::type>,
          .schedule = &schedule<Traits>,
          .column_limits = &column_limits<Mask>,
          .masked = &masked<Traits>};
}

template <int kHeadDim, class Mask, int... kChips>
void add_masked(Registry& registry, char const* mask, std::integer_sequence<int, kChips...>) {
  (registry.push_back(kernel<kHeadDim, Mask, kChips>(mask)), ...);
}

template <int kHeadDim>
void add(Registry& registry) {
  auto const chips = std::make_integer_sequence<int, kNumChips>{};
  add_masked<kHeadDim, FullMask>(registry, "full", chips);
  add_masked<kHeadDim, CausalMask>(registry, "causal", chips);
}

}  // namespace inspect::sm80
