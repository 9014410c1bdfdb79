// What all mainloops of the sm90 forward make of their traits: the operands of both products, in shared memory and in
// registers, and the accumulators.
#pragma once

#include "describe.h"
#include "wgmma.h"

#include "core/layout.cuh"

namespace inspect::sm90_forward {

// What a product reads at a time: a tile, or a unit of it.
struct Operands {
  int rows;
  int keys;
  int columns;        // of Q and K
  int columns_of_v;
  int keys_of_v;
  int columns_of_out;
};

// Never run: see describe.h.
template <class Traits, Operands kOperands>
auto entries() {
  using Element = typename Traits::Element;
  constexpr int kRows = kOperands.rows, kKeys = kOperands.keys, kColumns = kOperands.columns;
  constexpr int kColumnsOfV = kOperands.columns_of_v, kColumnsOfOut = kOperands.columns_of_out;
  auto const smem = make_smem_ptr(static_cast<Element*>(nullptr));
  auto sQ = make_tensor(smem, typename Traits::SmemLayoutQ{});    // (rows, columns, ...)
  auto sK = make_tensor(smem, typename Traits::SmemLayoutK{});    // (keys, columns, stage or unit)
  auto sVt = make_tensor(smem, typename Traits::SmemLayoutVt{});  // (columns, keys, stage or unit)
  auto const cQ = make_identity_layout(Shape<Int<kRows>, Int<kColumns>>{});
  auto const cK = make_identity_layout(Shape<Int<kKeys>, Int<kColumns>>{});
  auto const cVt = make_identity_layout(Shape<Int<kColumnsOfV>, Int<kOperands.keys_of_v>>{});
  auto const cS = make_identity_layout(Shape<Int<kRows>, Int<kKeys>>{});
  auto const cO = make_identity_layout(Shape<Int<kRows>, Int<kColumnsOfOut>>{});

  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  auto tSrQ = mma_qk.get_slice(0).partition_fragment_A(sQ);                            // (MMA, MMA_M, MMA_D, ...)
  auto tSrK = mma_qk.get_slice(0).partition_fragment_B(sK);                            // (MMA, MMA_N, MMA_D, ...)
  auto tOrV = mma_pv.get_slice(0).partition_fragment_B(sVt);                           // (MMA, MMA_D, MMA_N, ...)
  auto tSrS = partition_fragment_C(mma_qk, Shape<Int<kRows>, Int<kKeys>>{});           // (MMA, MMA_M, MMA_N)
  auto tOrO = partition_fragment_C(mma_pv, Shape<Int<kRows>, Int<kColumnsOfOut>>{});   // (MMA, MMA_M, MMA_D)

  return tuple_cat(
      smem_entry<"Q.smem">(typename Traits::SmemLayoutQ{}), smem_entry<"K.smem">(typename Traits::SmemLayoutK{}),
      smem_entry<"V.smem">(typename Traits::SmemLayoutVt{}),
      // Operands by descriptor: what each step wants, and where its descriptor is, in 16-byte units.
      shared_a_entry<"Q.mma.coord">(mma_qk, cQ), index_entry<"Q.descriptor">(tSrQ.layout()),
      shared_b_entry<"K.mma.coord">(mma_qk, cK), index_entry<"K.descriptor">(tSrK.layout()),
      shared_b_entry<"V.mma.coord">(mma_pv, cVt), index_entry<"V.descriptor">(tOrV.layout()),
      // The accumulators, and S read as the second product's A operand, by whichever warpgroup or CTA has it.
      mma_c_entry<"S.mma.coord">(mma_qk, cS), index_entry<"S.mma.register">(tSrS.layout()),
      mma_a_entry<"P.mma.coord">(mma_pv, cS),
      index_entry<"P.mma.register">(flash_cute::operand_a_layout_64(tSrS.layout())),
      mma_c_entry<"O.mma.coord">(mma_pv, cO), index_entry<"O.mma.register">(tOrO.layout()));
}

// Descriptors are made from addresses: of buffers at these offsets of a SharedStorage at address 0.
template <class Traits>
void add_descriptors(Details& out, size_t q, size_t k, size_t v) {
  auto at = [](size_t offset) { return make_smem_ptr(reinterpret_cast<typename Traits::Element*>(offset)); };
  auto const mma_qk = typename Traits::MmaQK{}.get_slice(0);
  auto const mma_pv = typename Traits::MmaPV{}.get_slice(0);
  add_descriptor(out, "Q.descriptor", mma_qk.partition_fragment_A(make_tensor(at(q), typename Traits::SmemLayoutQ{})));
  add_descriptor(out, "K.descriptor", mma_qk.partition_fragment_B(make_tensor(at(k), typename Traits::SmemLayoutK{})));
  add_descriptor(out, "V.descriptor", mma_pv.partition_fragment_B(make_tensor(at(v), typename Traits::SmemLayoutVt{})));
}

}  // namespace inspect::sm90_forward
