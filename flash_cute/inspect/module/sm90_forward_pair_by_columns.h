// The sm90 forward for head dims above 512 as data. Q, K and V lie in shared memory in units, which are the stages of
// their tensors here. The partitions are those of sm90/forward/pair_by_columns/mainloop.cuh, from the same types.
#pragma once

#include "describe.h"
#include "kernel_shape.h"
#include "problem.h"
#include "sm90_forward_operands.h"
#include "sm90_forward_pair.h"

#include "sm90/forward/pair_by_columns/tile.h"
#include "sm90/forward/pair_by_columns/traits.cuh"

namespace inspect::sm90_forward_pair_by_columns {

using namespace flash_cute;
using namespace flash_cute::sm90::forward::pair_by_columns;

// With a head dim of v above 512, see parts_of_v.
constexpr int kParts = 2;
constexpr int kHalf = kParts * kUnitColumnsOfV;

constexpr sm90_forward::Operands kOperands = {.rows = kBlockM,
                                              .keys = kBlockN,
                                              .columns = kUnitColumns,
                                              .columns_of_v = kUnitColumnsOfV,
                                              .keys_of_v = kUnitKeys,
                                              .columns_of_out = kHalf};

// P for the other warpgroup. Never run: see describe.h.
template <class Traits>
auto shared_p_entries() {
  using Element = typename Traits::Element;
  auto sP = make_tensor(make_smem_ptr(static_cast<Element*>(nullptr)), typename Traits::SmemLayoutP{});  // (64, BLK_N)
  auto const cS = make_identity_layout(Shape<Int<kBlockM>, Int<kBlockN>>{});
  typename Traits::MmaQK mma_qk;
  typename Traits::MmaSharedPV mma_shared_pv;
  auto tOrP_other = mma_shared_pv.get_slice(0).partition_fragment_A(sP);          // (MMA, MMA_M, MMA_N)
  auto tSrS = partition_fragment_C(mma_qk, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
  auto rP = make_tensor_like<Element>(tSrS);                                      // (MMA, MMA_M, MMA_N)
  auto const copy_p = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma_qk);
  return tuple_cat(
      smem_entry<"SharedP.smem">(typename Traits::SmemLayoutP{}),
      shared_a_entry<"SharedP.mma.coord">(mma_shared_pv, cS), index_entry<"SharedP.descriptor">(tOrP_other.layout()),
      copy_entry<"SharedP.sts.coord">(copy_p.tidfrg_D(cS)),
      index_entry<"SharedP.sts.register">(copy_p.get_slice(0).retile_S(rP).layout()));
}

template <class Traits>
Details describe() {
  using Storage = typename Traits::SharedStorage;
  Details out;
  AddAll<decltype(sm90_forward::entries<Traits, kOperands>())>::add(out);
  AddAll<decltype(shared_p_entries<Traits>())>::add(out);

  // V and P are those of the first warpgroup.
  using Element = typename Traits::Element;
  constexpr size_t kQ = offsetof(Storage, q), kK = offsetof(Storage, k), kV = offsetof(Storage, v);
  constexpr size_t kP = offsetof(Storage, p);
  sm90_forward::add_descriptors<Traits>(out, kQ, kK, kV);
  auto const sP = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(kP)), typename Traits::SmemLayoutP{});
  add_descriptor(out, "SharedP.descriptor", typename Traits::MmaSharedPV{}.get_slice(0).partition_fragment_A(sP));

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
                      .entry = "",
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
