// The sm90 forward for head dims 321 to 512 as data. Q, K and V lie in shared memory in units, which are the stages of
// their tensors here; K and V in the same ones. The partitions are those of sm90/forward/pair_by_turns/mainloop.cuh, from the same
// types.
#pragma once

#include "describe.h"
#include "kernel_shape.h"
#include "problem.h"
#include "sm90_forward_pair.h"
#include "wgmma.h"

#include "sm90/forward/pair_by_turns/tile.h"
#include "sm90/forward/pair_by_turns/traits.cuh"

namespace inspect::sm90_forward_pair_by_turns {

using namespace flash_cute;
using namespace flash_cute::sm90::forward::pair_by_turns;

// Never run: see describe.h.
template <class Traits>
auto entries() {
  using Element = typename Traits::Element;
  auto const smem = make_smem_ptr(static_cast<Element*>(nullptr));
  auto sQ = make_tensor(smem, typename Traits::SmemLayoutQ{});    // (64, D of chunk, chunk)
  auto sK = make_tensor(smem, typename Traits::SmemLayoutK{});    // (BLK_N, D of unit, unit)
  auto sVt = make_tensor(smem, typename Traits::SmemLayoutVt{});  // (D of unit, N of unit, unit)
  auto const cQ = make_identity_layout(Shape<Int<kRows>, Int<kChunk>>{});
  auto const cK = make_identity_layout(Shape<Int<kBlockN>, Int<kChunk>>{});
  auto const cVt = make_identity_layout(Shape<Int<kChunk>, Int<kBlockN>>{});
  auto const cS = make_identity_layout(Shape<Int<kRows>, Int<kBlockN>>{});
  auto const cO = make_identity_layout(Shape<Int<kRows>, Int<kColumns>>{});

  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  auto tSrQ = mma_qk.get_slice(0).partition_fragment_A(sQ);                           // (MMA, MMA_M, MMA_D, chunk)
  auto tSrK = mma_qk.get_slice(0).partition_fragment_B(sK);                           // (MMA, MMA_N, MMA_D, unit)
  auto tOrV = mma_pv.get_slice(0).partition_fragment_B(sVt);                          // (MMA, MMA_D, MMA_N, unit)
  auto tSrS = partition_fragment_C(mma_qk, Shape<Int<kRows>, Int<kBlockN>>{});        // (MMA, MMA_M, MMA_N)
  auto tOrO = partition_fragment_C(mma_pv, Shape<Int<kRows>, Int<kColumns>>{});       // (MMA, MMA_M, MMA_D)

  return tuple_cat(
      smem_entry<"Q.smem">(typename Traits::SmemLayoutQ{}), smem_entry<"K.smem">(typename Traits::SmemLayoutK{}),
      smem_entry<"V.smem">(typename Traits::SmemLayoutVt{}),
      // Operands by descriptor: what each step wants, and where its descriptor is, in 16-byte units.
      shared_a_entry<"Q.mma.coord">(mma_qk, cQ), index_entry<"Q.descriptor">(tSrQ.layout()),
      shared_b_entry<"K.mma.coord">(mma_qk, cK), index_entry<"K.descriptor">(tSrK.layout()),
      shared_b_entry<"V.mma.coord">(mma_pv, cVt), index_entry<"V.descriptor">(tOrV.layout()),
      // The accumulators, and S read as the second product's A operand, in this CTA and in the other one.
      mma_c_entry<"S.mma.coord">(mma_qk, cS), index_entry<"S.mma.register">(tSrS.layout()),
      mma_a_entry<"P.mma.coord">(mma_pv, cS), index_entry<"P.mma.register">(operand_a_layout_64(tSrS.layout())),
      mma_c_entry<"O.mma.coord">(mma_pv, cO), index_entry<"O.mma.register">(tOrO.layout()));
}

template <class Traits>
Details describe() {
  using Storage = typename Traits::SharedStorage;
  Details out;
  AddAll<decltype(entries<Traits>())>::add(out);

  // Descriptors are made from addresses: of a SharedStorage at address 0. Q is the first warpgroup's.
  using Element = typename Traits::Element;
  auto at = [](size_t offset) { return make_smem_ptr(reinterpret_cast<Element*>(offset)); };
  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  constexpr size_t kQ = offsetof(Storage, q), kRing = offsetof(Storage, units);
  add_descriptor(out, "Q.descriptor",
                 mma_qk.get_slice(0).partition_fragment_A(make_tensor(at(kQ), typename Traits::SmemLayoutQ{})));
  add_descriptor(out, "K.descriptor",
                 mma_qk.get_slice(0).partition_fragment_B(make_tensor(at(kRing), typename Traits::SmemLayoutK{})));
  add_descriptor(out, "V.descriptor",
                 mma_pv.get_slice(0).partition_fragment_B(make_tensor(at(kRing), typename Traits::SmemLayoutVt{})));

  int const received = int(offsetof(Storage, messages)), rest = int(offsetof(Storage, ring));
  out.buffers = {{"Q", int(kQ), int(sizeof(Storage::q))},
                 {"K and V", int(kRing), int(sizeof(Storage::units))},
                 {"from the other CTA", received, rest - received},
                 {"barriers", rest, int(sizeof(Storage)) - rest}};
  out.facts["element_bytes"] = sizeof(Element);
  out.facts["box.columns"] = kChunk;
  add_atom<typename Traits::MmaQK::AtomShape_MNK>(out);
  return out;
}

template <int kHeadDim>
void add(Registry& registry) {
  using Traits = sm90::forward::pair_by_turns::Traits<cutlass::half_t, kHeadDim, Variant::kPacked>;
  registry.push_back({.arch = "sm90",
                      .folder = "forward/pair_by_turns",
                      .entry = "large",
                      .entry_index = 0,
                      .head_dim = kHeadDim,
                      .tile = {{"parts", Traits::kCtas},
                               {"turns", Traits::kCtas},
                               {"unit_columns", kChunk},
                               {"unit_columns_of_v", kChunk},
                               {"unit_keys", kBlockN},
                               {"units_of_v", kUnitsOfV},
                               {"units", kUnits},
                               {"columns_of_o", kColumns},
                               {"message_bytes", kMessageBytes}},
                      .shape = shape_of(kernel_shape()),
                      .facts = sm90_forward_pair::facts<Traits>(),
                      .describe = &describe<Traits>,
                      .schedule = &sm90_forward_pair::schedule<Traits>,
                      .masked = &masked<FwdParams, false, typename Traits::MmaQK, 128, Traits::kWarpgroups, kRows,
                                        kBlockN>,
                      .packed_schedule = &sm90_forward_pair::packed_schedule<Traits>});
}

}  // namespace inspect::sm90_forward_pair_by_turns
