// The sm80 backward's traits as data. The partitions are those of sm80/backward/dq_in_memory/products.cuh, load.cuh and
// epilogue.cuh, from the same types. V is laid out and read as K is, dO as Q, P^T (where it is in shared memory) as
// dS^T, and dV leaves as dK.
#pragma once

#include <algorithm>

#include "describe.h"
#include "kernel_shape.h"
#include "ldmatrix.h"
#include "problem.h"

#include "sm80/backward/dq_in_memory/tile.h"
#include "sm80/backward/dq_in_memory/traits.cuh"

namespace inspect::sm80_backward_dq_in_memory {

using namespace flash_cute;
using namespace flash_cute::sm80::backward::dq_in_memory;
using flash_cute::sm80::kChipNames;
using flash_cute::sm80::kMaxSmemBytes;
using flash_cute::sm80::kNumChips;

// dS^T as the A operand of dK: the registers of S^T read in another order, or fetched from shared memory.
template <class Traits, class Mma, class Scores, class Copy, class Identity>
auto dst_entries(Mma const& mma, Scores const& tSrS, Copy const& copy, Identity const& cS) {
  using Element = typename Traits::Element;
  auto const coord = mma_a_entry<"dSt.mma.coord">(mma, cS);
  if constexpr (Traits::kPInRegs) {
    return tuple_cat(coord, index_entry<"dSt.mma.register">(operand_a_layout(tSrS.layout())));
  } else {
    auto tCrA = fragment_a<Element>(mma, Shape<Int<Traits::kBlockN>, Int<Traits::kScoreRows>>{});
    return tuple_cat(coord, operand_entries<"dSt.ldsm.coord", "dSt.ldsm.register", "dSt.mma.register">(copy, tCrA, cS));
  }
}

// Never run: see describe.h.
template <class Traits>
auto entries() {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kRows = Traits::kScoreRows;  // of a part
  using Keys = Shape<Int<kBlockN>, Int<kHeadDim>>;
  using KeysT = Shape<Int<kHeadDim>, Int<kBlockN>>;
  using Rows = Shape<Int<kRows>, Int<kHeadDim>>;
  using RowsT = Shape<Int<kHeadDim>, Int<kRows>>;
  using Scores = Shape<Int<kBlockM>, Int<kBlockN>>;
  using ScoresT = Shape<Int<kBlockN>, Int<kRows>>;
  auto const cK = make_identity_layout(Keys{});
  auto const cKt = make_identity_layout(KeysT{});
  auto const cQ = make_identity_layout(Rows{});
  auto const cQt = make_identity_layout(RowsT{});
  auto const cS = make_identity_layout(Scores{});
  auto const cSt = make_identity_layout(ScoresT{});
  auto const cdQ = make_identity_layout(Shape<Int<kBlockM>, Int<kHeadDim>>{});

  typename Traits::GmemLoad gmem_load;
  typename Traits::GmemStore gmem_store;
  typename Traits::MmaScores mma_scores;
  typename Traits::MmaKeys mma_keys;
  typename Traits::MmaQueries mma_queries;
  typename Traits::SmemCopyAtom const along;
  typename Traits::SmemCopyAtomTransposed const across;
  typename Traits::SmemStoreAtom const store_atom;
  auto tSrK = fragment_a<Element>(mma_scores, Keys{});                    // (MMA, MMA_N, MMA_D)
  auto tSrQ = fragment_b<Element>(mma_scores, Rows{});                    // (MMA, MMA_M, MMA_D)
  auto tdKrQ = fragment_b<Element>(mma_keys, RowsT{});                    // (MMA, MMA_D, MMA_M)
  auto tdQrdS = fragment_a<Element>(mma_queries, Scores{});               // (MMA, MMA_M, MMA_N)
  auto tdQrK = fragment_b<Element>(mma_queries, KeysT{});                 // (MMA, MMA_D, MMA_N)
  auto tSrS = partition_fragment_C(mma_scores, ScoresT{});                // (MMA, MMA_N, MMA_M)
  auto tdKrdK = partition_fragment_C(mma_keys, Keys{});                   // (MMA, MMA_N, MMA_D)
  auto tdQrdQ = partition_fragment_C(mma_queries, Shape<Int<kBlockM>, Int<kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
  auto rdS = make_tensor_like<Element>(tSrS);                             // (MMA, MMA_N, MMA_M)
  auto rdK = make_tensor_like<Element>(tdKrdK);                           // (MMA, MMA_N, MMA_D)
  auto const store_scores = make_tiled_copy_C(store_atom, mma_scores);
  auto const store_out = make_tiled_copy_C(store_atom, mma_keys);

  return tuple_cat(
      smem_entry<"K.smem">(typename Traits::SmemLayoutK{}), smem_entry<"Kt.smem">(typename Traits::SmemLayoutKt{}),
      smem_entry<"Q.smem">(typename Traits::SmemLayoutQ{}), smem_entry<"Qt.smem">(typename Traits::SmemLayoutQt{}),
      smem_entry<"dS.smem">(typename Traits::SmemLayoutS{}), smem_entry<"dSt.smem">(typename Traits::SmemLayoutSt{}),
      // Global to shared memory, and dK's way back.
      copy_entry<"K.gmem.coord">(gmem_load.tidfrg_D(cK)), copy_entry<"Q.gmem.coord">(gmem_load.tidfrg_D(cQ)),
      copy_entry<"dK.gmem.coord">(gmem_store.tidfrg_S(cK)),
      // S^T = K Q^T
      operand_entries<"K.ldsm.coord", "K.ldsm.register", "K.mma.register">(make_tiled_copy_A(along, mma_scores), tSrK,
                                                                           cK),
      operand_entries<"Q.ldsm.coord", "Q.ldsm.register", "Q.mma.register">(make_tiled_copy_B(along, mma_scores), tSrQ,
                                                                           cQ),
      mma_a_entry<"K.mma.coord">(mma_scores, cK), mma_b_entry<"Q.mma.coord">(mma_scores, cQ),
      mma_c_entry<"S.mma.coord">(mma_scores, cSt), index_entry<"S.mma.register">(tSrS.layout()),
      copy_entry<"dSt.sts.coord">(store_scores.tidfrg_D(cSt)),
      index_entry<"dSt.sts.register">(store_scores.get_slice(0).retile_S(rdS).layout()),
      // dK += dS^T Q
      dst_entries<Traits>(mma_keys, tSrS, make_tiled_copy_A(along, mma_keys), cSt),
      operand_entries<"Qt.ldsm.coord", "Qt.ldsm.register", "Qt.mma.register">(make_tiled_copy_B(across, mma_keys),
                                                                              tdKrQ, cQt),
      mma_b_entry<"Qt.mma.coord">(mma_keys, cQt), mma_c_entry<"dK.mma.coord">(mma_keys, cK),
      index_entry<"dK.mma.register">(tdKrdK.layout()), copy_entry<"dK.sts.coord">(store_out.tidfrg_D(cK)),
      index_entry<"dK.sts.register">(store_out.get_slice(0).retile_S(rdK).layout()),
      // dQ = dS K
      operand_entries<"dS.ldsm.coord", "dS.ldsm.register", "dS.mma.register">(make_tiled_copy_A(across, mma_queries),
                                                                             tdQrdS, cS),
      operand_entries<"Kt.ldsm.coord", "Kt.ldsm.register", "Kt.mma.register">(make_tiled_copy_B(across, mma_queries),
                                                                             tdQrK, cKt),
      mma_a_entry<"dS.mma.coord">(mma_queries, cS), mma_b_entry<"Kt.mma.coord">(mma_queries, cKt),
      mma_c_entry<"dQ.mma.coord">(mma_queries, cdQ), index_entry<"dQ.mma.register">(tdQrdQ.layout()));
}

template <class Traits>
Details describe() {
  using SharedStorage = typename Traits::SharedStorage;
  Details out;
  AddAll<decltype(entries<Traits>())>::add(out);
  out.buffers = {{"K, then dK", int(offsetof(SharedStorage, k)), int(sizeof(SharedStorage::k))},
                 {"V, then dV", int(offsetof(SharedStorage, v)), int(sizeof(SharedStorage::v))},
                 {"Q", int(offsetof(SharedStorage, q)), int(sizeof(SharedStorage::q))},
                 {"dO", int(offsetof(SharedStorage, dout)), int(sizeof(SharedStorage::dout))},
                 {"dS", int(offsetof(SharedStorage, ds)), int(sizeof(SharedStorage::ds))}};
  if constexpr (!Traits::kPInRegs) {
    out.buffers.push_back({"P", int(offsetof(SharedStorage, p)), int(sizeof(SharedStorage::p))});
  }
  int const statistics = int(offsetof(SharedStorage, lse_log2));
  out.buffers.push_back({"LSE and delta", statistics, int(sizeof(SharedStorage)) - statistics});
  out.facts["element_bytes"] = sizeof(typename Traits::Element);
  out.facts["dSt.sts.bytes"] = out.facts["dK.sts.bytes"] = sizeof(uint32_t);
  out.facts["gmem.bytes"] = Traits::kChunk * int(sizeof(typename Traits::Element));
  for (char const* name : {"K.ldsm", "Q.ldsm"}) add_matrices<typename Traits::SmemCopyAtom>(out, name);
  for (char const* name : {"Kt.ldsm", "Qt.ldsm", "dS.ldsm"}) {
    add_matrices<typename Traits::SmemCopyAtomTransposed>(out, name);
  }
  if constexpr (!Traits::kPInRegs) add_matrices<typename Traits::SmemCopyAtom>(out, "dSt.ldsm");
  using AtomShape = typename Traits::MmaScores::AtomShape_MNK;
  out.facts["mma.m"] = size<0>(AtomShape{});
  out.facts["mma.n"] = size<1>(AtomShape{});
  out.facts["mma.k"] = size<2>(AtomShape{});
  return out;
}

template <int kHeadDim, int kChip>
Kernel kernel() {
  constexpr TileConfig kTile = tile_config(kHeadDim, kChip);
  using Traits = sm80::backward::dq_in_memory::Traits<cutlass::half_t, kHeadDim, kTile>;
  return {.arch = "sm80",
          .folder = "backward/dq_in_memory",
          .entry = kChipNames[kChip],
          .entry_index = kChip,
          .head_dim = kHeadDim,
          .tile = {{"block_m", kTile.block_m},
                   {"block_n", kTile.block_n},
                   {"warps", kTile.warps},
                   {"score_warps", kTile.score_warps},
                   {"key_warps", kTile.key_warps},
                   {"row_warps", kTile.row_warps},
                   {"q_stages", kTile.q_stages},
                   {"dout_stages", kTile.dout_stages},
                   {"budgeted_ctas", kTile.ctas_per_sm}},
          .shape = shape_of(kernel_shape(kHeadDim, kChip)),
          .facts = {{"block_m", Traits::kBlockM},
                    {"block_n", Traits::kBlockN},
                    {"threads", Traits::kThreads},
                    {"stages", Traits::kQStages},
                    {"score_rows", Traits::kScoreRows},
                    {"smem_bytes", int(sizeof(typename Traits::SharedStorage))},
                    {"smem_limit", kMaxSmemBytes[kChip]},
                    {"register_limit", std::min(255, 65536 / (Traits::kThreads * kTile.ctas_per_sm) / 8 * 8)}},
          .describe = &describe<Traits>,
          .schedule = nullptr,
          .masked = &masked<BwdParams, true, typename Traits::MmaScores, Traits::kThreads, Traits::kParts,
                            Traits::kScoreRows, Traits::kBlockN>};
}

template <int kHeadDim>
void add(Registry& registry) {
  [&]<int... kChips>(std::integer_sequence<int, kChips...>) {
    (registry.push_back(kernel<kHeadDim, kChips>()), ...);
  }(std::make_integer_sequence<int, kNumChips>{});
}

}  // namespace inspect::sm80_backward_dq_in_memory
