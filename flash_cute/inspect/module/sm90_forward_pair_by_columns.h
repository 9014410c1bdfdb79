// The sm90 forward for head dims above 512 as data. Q, K and V lie in shared memory in units, which are the stages of their
// tensors here. The partitions are those of sm90/forward/pair_by_columns/mainloop.cuh, from the same types.
#pragma once

#include "describe.h"
#include "kernel_shape.h"
#include "problem.h"
#include "sm90_forward_pair.h"
#include "wgmma.h"

#include "sm90/forward/pair_by_columns/tile.h"
#include "sm90/forward/pair_by_columns/traits.cuh"

namespace inspect::sm90_forward_pair_by_columns {

using namespace flash_cute;
using namespace flash_cute::sm90::forward::pair_by_columns;

// With a head dim of v above 512, see parts_of_v.
constexpr int kParts = 2;
constexpr int kHalf = kParts * kUnitColumnsOfV;

// Never run: see describe.h.
template <class Traits>
auto entries() {
  using Element = typename Traits::Element;
  using Store = Copy_Atom<SM90_U32x4_STSM_N, Element>;
  auto const smem = make_smem_ptr(static_cast<Element*>(nullptr));
  auto sQ = make_tensor(smem, typename Traits::SmemLayoutQ{});    // (64, D of unit, unit)
  auto sK = make_tensor(smem, typename Traits::SmemLayoutK{});    // (BLK_N, D of unit, unit)
  auto sVt = make_tensor(smem, typename Traits::SmemLayoutVt{});  // (D / 2 of unit, N of unit, unit)
  auto sP = make_tensor(smem, typename Traits::SmemLayoutP{});    // (64, BLK_N)
  auto const cQ = make_identity_layout(Shape<Int<kBlockM>, Int<kUnitColumns>>{});
  auto const cK = make_identity_layout(Shape<Int<kBlockN>, Int<kUnitColumns>>{});
  auto const cVt = make_identity_layout(Shape<Int<kUnitColumnsOfV>, Int<kUnitKeys>>{});
  auto const cS = make_identity_layout(Shape<Int<kBlockM>, Int<kBlockN>>{});
  auto const cO = make_identity_layout(Shape<Int<kBlockM>, Int<kHalf>>{});

  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  typename Traits::MmaSharedPV mma_shared_pv;
  auto tSrQ = mma_qk.get_slice(0).partition_fragment_A(sQ);                       // (MMA, MMA_M, MMA_D, unit)
  auto tSrK = mma_qk.get_slice(0).partition_fragment_B(sK);                       // (MMA, MMA_N, MMA_D, unit)
  auto tOrV = mma_pv.get_slice(0).partition_fragment_B(sVt);                      // (MMA, MMA_D, MMA_N, unit)
  auto tOrP_other = mma_shared_pv.get_slice(0).partition_fragment_A(sP);          // (MMA, MMA_M, MMA_N)
  auto tSrS = partition_fragment_C(mma_qk, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
  auto rP = make_tensor_like<Element>(tSrS);                                      // (MMA, MMA_M, MMA_N)
  auto tOrO = partition_fragment_C(mma_pv, Shape<Int<kBlockM>, Int<kHalf>>{});  // (MMA, MMA_M, MMA_D)
  auto const copy_p = make_tiled_copy_C(Store{}, mma_qk);

  return tuple_cat(
      smem_entry<"Q.smem">(typename Traits::SmemLayoutQ{}), smem_entry<"K.smem">(typename Traits::SmemLayoutK{}),
      smem_entry<"V.smem">(typename Traits::SmemLayoutVt{}), smem_entry<"SharedP.smem">(typename Traits::SmemLayoutP{}),
      // Operands by descriptor: what each step wants, and where its descriptor is, in 16-byte units.
      shared_a_entry<"Q.mma.coord">(mma_qk, cQ), index_entry<"Q.descriptor">(tSrQ.layout()),
      shared_b_entry<"K.mma.coord">(mma_qk, cK), index_entry<"K.descriptor">(tSrK.layout()),
      shared_b_entry<"V.mma.coord">(mma_pv, cVt), index_entry<"V.descriptor">(tOrV.layout()),
      shared_a_entry<"SharedP.mma.coord">(mma_shared_pv, cS), index_entry<"SharedP.descriptor">(tOrP_other.layout()),
      // The accumulators, and S read as the second product's A operand, by the warpgroup that has it.
      mma_c_entry<"S.mma.coord">(mma_qk, cS), index_entry<"S.mma.register">(tSrS.layout()),
      mma_a_entry<"P.mma.coord">(mma_pv, cS), index_entry<"P.mma.register">(operand_a_layout_64(tSrS.layout())),
      mma_c_entry<"O.mma.coord">(mma_pv, cO), index_entry<"O.mma.register">(tOrO.layout()),
      // P for the other warpgroup.
      copy_entry<"SharedP.sts.coord">(copy_p.tidfrg_D(cS)),
      index_entry<"SharedP.sts.register">(copy_p.get_slice(0).retile_S(rP).layout()));
}

template <class Traits>
Details describe() {
  using Storage = typename Traits::SharedStorage;
  Details out;
  AddAll<decltype(entries<Traits>())>::add(out);

  // Descriptors are made from addresses: of a SharedStorage at address 0. V and P are those of the first warpgroup.
  using Element = typename Traits::Element;
  auto at = [](size_t offset) { return make_smem_ptr(reinterpret_cast<Element*>(offset)); };
  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  typename Traits::MmaSharedPV mma_shared_pv;
  constexpr size_t kQ = offsetof(Storage, q), kK = offsetof(Storage, k), kV = offsetof(Storage, v);
  constexpr size_t kP = offsetof(Storage, p);
  add_descriptor(out, "Q.descriptor",
                 mma_qk.get_slice(0).partition_fragment_A(make_tensor(at(kQ), typename Traits::SmemLayoutQ{})));
  add_descriptor(out, "K.descriptor",
                 mma_qk.get_slice(0).partition_fragment_B(make_tensor(at(kK), typename Traits::SmemLayoutK{})));
  add_descriptor(out, "V.descriptor",
                 mma_pv.get_slice(0).partition_fragment_B(make_tensor(at(kV), typename Traits::SmemLayoutVt{})));
  add_descriptor(out, "SharedP.descriptor",
                 mma_shared_pv.get_slice(0).partition_fragment_A(make_tensor(at(kP), typename Traits::SmemLayoutP{})));

  out.buffers = {{"Q", int(kQ), int(sizeof(Storage::q))},
                 {"K", int(kK), int(sizeof(Storage::k))},
                 {"V", int(kV), int(sizeof(Storage::v))},
                 {"S, then P", int(kP), int(sizeof(Storage::p))}};
  int const rest = int(offsetof(Storage, rows));
  out.buffers.push_back({"statistics, barriers", rest, int(sizeof(Storage)) - rest});

  out.facts["element_bytes"] = sizeof(Element);
  out.facts["SharedP.sts.bytes"] = 16;
  out.facts["box.columns"] = Traits::kChunk;
  add_atom<typename Traits::MmaQK::AtomShape_MNK>(out);
  return out;
}

template <int kHeadDim>
void add(Registry& registry) {
  using Traits = sm90::forward::pair_by_columns::Traits<cutlass::half_t, kHeadDim, Variant::kPacked>;
  registry.push_back({.arch = "sm90",
                      .folder = "forward/pair_by_columns",
                      .entry = "large",
                      .entry_index = 0,
                      .head_dim = kHeadDim,
                      .tile = {{"parts", Traits::kCtas},
                               {"unit_columns", kUnitColumns},
                               {"unit_columns_of_v", kUnitColumnsOfV},
                               {"unit_keys", kUnitKeys},
                               {"units_of_k", kUnitsOfK},
                               {"units_of_v", kParts * kBlockN / kUnitKeys},
                               {"units_of_v_ring", kUnitsOfVRing},
                               {"columns_of_o", kHalf}},
                      .shape = shape_of(kernel_shape()),
                      .facts = sm90_forward_pair::facts<Traits>(),
                      .describe = &describe<Traits>,
                      .schedule = &sm90_forward_pair::schedule<Traits>,
                      .masked = &masked<FwdParams, false, typename Traits::MmaQK, 128, 1, kBlockM, kBlockN>,
                      .packed_schedule = &sm90_forward_pair::packed_schedule<Traits>});
}

}  // namespace inspect::sm90_forward_pair_by_columns
