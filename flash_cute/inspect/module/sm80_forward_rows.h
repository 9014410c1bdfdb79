// The sm80 forward's traits as data. The partitions are those of sm80/forward/rows/mainloop.cuh,
// sm80/common/load_cp_async.cuh and sm80/forward/rows/epilogue.cuh, from the same types.
#pragma once

#include "describe.h"
#include "kernel_shape.h"
#include "ldmatrix.h"
#include "problem.h"

#include "sm80/forward/rows/tile.h"
#include "sm80/forward/rows/traits.cuh"

namespace inspect::sm80_forward_rows {

using namespace flash_cute;
using namespace flash_cute::sm80::forward;
using namespace flash_cute::sm80::forward::rows;
using flash_cute::sm80::kChipNames;
using flash_cute::sm80::kMaxSmemBytes;
using flash_cute::sm80::kNumChips;

// What a mainloop makes of its traits. The studies' schedules have others, see sm80_schedules.h.
template <class Traits>
struct View {
  using MmaS = typename Traits::Mma;
  using MmaO = typename Traits::Mma;
  using SmemLayoutV = typename Traits::SmemLayoutKV;
  using SmemLayoutVt = typename Traits::SmemLayoutVt;
  static constexpr int kColumns = Traits::kHeadDim;
};

// Never run: see describe.h.
template <class Traits, class V>
auto entries() {
  using Element = typename Traits::Element;
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
  auto tSrQ = fragment_a<Element>(mma_s, Shape<Int<kBlockM>, Int<kColumns>>{});  // (MMA, MMA_M, MMA_D)
  auto tSrK = fragment_b<Element>(mma_s, Shape<Int<kBlockN>, Int<kColumns>>{});  // (MMA, MMA_N, MMA_D)
  auto tOrV = fragment_b<Element>(mma_o, Shape<Int<kColumns>, Int<kBlockN>>{});  // (MMA, MMA_D, MMA_N)
  auto tSrS = partition_fragment_C(mma_s, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
  auto tOrO = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kColumns>>{});   // (MMA, MMA_M, MMA_D)
  auto rO = make_tensor_like<Element>(tOrO);                                     // (MMA, MMA_M, MMA_D)
  auto const copy_q = make_tiled_copy_A(typename Traits::SmemCopyAtom{}, mma_s);
  auto const copy_k = make_tiled_copy_B(typename Traits::SmemCopyAtom{}, mma_s);
  auto const copy_v = make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, mma_o);
  auto const copy_o = make_tiled_copy_C(Copy_Atom<UniversalCopy<uint32_t>, Element>{}, mma);

  return tuple_cat(
      smem_entry<"Q.smem">(typename Traits::SmemLayoutQ{}), smem_entry<"K.smem">(typename Traits::SmemLayoutKV{}),
      smem_entry<"V.smem">(typename V::SmemLayoutVt{}),  // (D, BLK_N, stage), as the MMA takes it
      smem_entry<"V.rows">(typename V::SmemLayoutV{}),   // (BLK_N, D, stage), as it is loaded
      // Global to shared memory, K and V alike, and the output's way back.
      copy_entry<"Q.gmem.coord">(gmem_load.tidfrg_D(cQ)), copy_entry<"K.gmem.coord">(gmem_load.tidfrg_D(cK)),
      copy_entry<"O.gmem.coord">(gmem_store.tidfrg_S(cQ)),
      // Shared memory to registers.
      operand_entries<"Q.ldsm.coord", "Q.ldsm.register", "Q.mma.register">(copy_q, tSrQ, cQ),
      operand_entries<"K.ldsm.coord", "K.ldsm.register", "K.mma.register">(copy_k, tSrK, cK),
      operand_entries<"V.ldsm.coord", "V.ldsm.register", "V.mma.register">(copy_v, tOrV, cVt),
      mma_a_entry<"Q.mma.coord">(mma_s, cQ), mma_b_entry<"K.mma.coord">(mma_s, cK),
      mma_b_entry<"V.mma.coord">(mma_o, cVt),
      // The accumulators, and S read as the second product's A operand.
      mma_c_entry<"S.mma.coord">(mma_s, cS), index_entry<"S.mma.register">(tSrS.layout()),
      mma_a_entry<"P.mma.coord">(mma_o, cS), index_entry<"P.mma.register">(operand_a_layout(tSrS.layout())),
      mma_c_entry<"O.mma.coord">(mma, cQ), index_entry<"O.mma.register">(tOrO.layout()),
      // The output tile, over Q.
      copy_entry<"O.sts.coord">(copy_o.tidfrg_D(cQ)),
      index_entry<"O.sts.register">(copy_o.get_slice(0).retile_S(rO).layout()));
}

template <class Traits, class V = View<Traits>>
Details describe(std::vector<Buffer> const& buffers) {
  Details out;
  AddAll<decltype(entries<Traits, V>())>::add(out);
  out.buffers = buffers;
  out.facts["element_bytes"] = sizeof(typename Traits::Element);
  out.facts["O.sts.bytes"] = sizeof(uint32_t);
  out.facts["gmem.bytes"] = Traits::kChunk * int(sizeof(typename Traits::Element));
  add_matrices<typename Traits::SmemCopyAtom>(out, "Q.ldsm");
  add_matrices<typename Traits::SmemCopyAtom>(out, "K.ldsm");
  add_matrices<typename Traits::SmemCopyAtomTransposed>(out, "V.ldsm");
  add_atom<typename Traits::Mma::AtomShape_MNK>(out);
  return out;
}

template <class Traits>
Details describe() {
  using SharedStorage = typename Traits::SharedStorage;
  return describe<Traits>({{"Q, then O", int(offsetof(SharedStorage, q)), int(sizeof(SharedStorage::q))},
                           {"K", int(offsetof(SharedStorage, k)), int(sizeof(SharedStorage::k))},
                           {"V", int(offsetof(SharedStorage, v)), int(sizeof(SharedStorage::v))}});
}

// The layouts do not depend on the element type: describe() is compiled for float16.
template <class Traits, class Other>
constexpr bool kSameLayouts =
    std::is_same_v<typename Traits::SmemLayoutQ, typename Other::SmemLayoutQ> &&
    std::is_same_v<typename Traits::SmemLayoutKV, typename Other::SmemLayoutKV> &&
    std::is_same_v<typename Traits::SmemLayoutVt, typename Other::SmemLayoutVt> &&
    kSameMma<typename Traits::Mma, typename Other::Mma> &&
    std::is_same_v<typename Traits::GmemLoad::TiledLayout_TV, typename Other::GmemLoad::TiledLayout_TV> &&
    sizeof(typename Traits::SharedStorage) == sizeof(typename Other::SharedStorage);

template <class Traits>
Array schedule(Problem const& problem, int /*num_sms*/) {
  auto const params = params_of<FwdParams>(problem);
  KernelShape const shape{.block_m = Traits::kBlockM, .block_n = Traits::kBlockN};
  TileOrder const order = tile_order(shape, is_masked(params.band), params.batch, params.heads_q, params.heads_kv,
                                     params.len_q, params.len_k, params.head_dim);
  Array array{{7, int(order.num_tiles())}, {}};
  for (int index = 0; index < order.num_tiles(); ++index) {
    RowTileCoord const tile = order.coord(index);
    append(array, tile, key_range<Traits::kBlockM, Traits::kBlockN>(params, tile.m_block));
  }
  return array;
}

template <int kHeadDim, int kChip>
Kernel kernel() {
  constexpr TileConfig kTile = tile_config(kHeadDim, kChip);
  using Traits = sm80::forward::rows::Traits<cutlass::half_t, kHeadDim, kTile>;
  static_assert(kSameLayouts<Traits, sm80::forward::rows::Traits<cutlass::bfloat16_t, kHeadDim, kTile>>);
  return {.arch = "sm80",
          .folder = "forward/rows",
          .entry = kChipNames[kChip],
          .entry_index = kChip,
          .head_dim = kHeadDim,
          .tile = {{"block_m", kTile.block_m},
                   {"block_n", kTile.block_n},
                   {"warps", kTile.warps},
                   {"stages", kTile.stages},
                   {"q_in_regs", kTile.q_in_regs},
                   {"budgeted_ctas", kTile.ctas_per_sm}},
          .shape = shape_of(kernel_shape(kHeadDim, kChip)),
          .facts = {{"block_m", Traits::kBlockM},
                    {"block_n", Traits::kBlockN},
                    {"threads", Traits::kThreads},
                    {"stages", Traits::kStages},
                    {"smem_bytes", int(sizeof(typename Traits::SharedStorage))},
                    {"smem_limit", kMaxSmemBytes[kChip]},
                    {"register_limit", std::min(255, 65536 / (Traits::kThreads * kTile.ctas_per_sm) / 8 * 8)}},
          .describe = [] { return describe<Traits>(); },
          .schedule = &schedule<Traits>,
          .masked =
              &masked<FwdParams, false, typename Traits::Mma, Traits::kThreads, 1, Traits::kBlockM, Traits::kBlockN>};
}

template <int kHeadDim>
void add(Registry& registry) {
  [&]<int... kChips>(std::integer_sequence<int, kChips...>) {
    (registry.push_back(kernel<kHeadDim, kChips>()), ...);
  }(std::make_integer_sequence<int, kNumChips>{});
}

}  // namespace inspect::sm80_forward_rows
