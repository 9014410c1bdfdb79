// The sm90 float8 forward's traits as data. The partitions are those of sm90/forward/fp8_rows/mainloop.cuh and
// epilogue.cuh, from the same types; the transposition of V is transpose.cuh's own, run here by each lane.
#pragma once

#include "describe.h"
#include "kernel_shape.h"
#include "problem.h"
#include "sm90_forward_packed.h"
#include "sm90_forward_walks.h"
#include "wgmma.h"

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

// --- What a lane of the transposing warps does ------------------------------------------------------------------

namespace inspect {

struct RecordedLane {
  void const* loaded;
  void const* stored;
  uint32_t words[4];
};
inline RecordedLane recorded_lane;

}  // namespace inspect

namespace cute {

// A lane's 16 bytes get the numbers 0 to 15.
struct RecordedLoad {
  static void copy(uint128_t const& source, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
    ::inspect::recorded_lane.loaded = &source;
    a = 0x03020100, b = 0x07060504, c = 0x0b0a0908, d = 0x0f0e0d0c;
  }
};

struct RecordedStore {
  static void copy(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint128_t& target) {
    ::inspect::recorded_lane = {::inspect::recorded_lane.loaded, &target, {a, b, c, d}};
  }
};

}  // namespace cute

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  uint64_t const both = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

#define SM75_U16x8_LDSM_T RecordedLoad
#define SM90_U32x4_STSM_N RecordedStore
#include "sm90/forward/fp8_rows/transpose.cuh"
#undef SM75_U16x8_LDSM_T
#undef SM90_U32x4_STSM_N

#include "sm90/forward/fp8_rows/key_order.h"
#include "sm90/forward/fp8_rows/tile.h"
#include "sm90/forward/fp8_rows/traits.cuh"

namespace inspect::sm90_forward_fp8_rows {

using namespace flash_cute;
using namespace flash_cute::sm90::forward;
using namespace flash_cute::sm90::forward::fp8_rows;

// Never run: see describe.h.
template <class Traits>
auto entries() {
  using Element = typename Traits::Element;
  constexpr int kRows = Traits::kRows, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  static_assert(kHeadDim == Traits::kHeadDimV);
  auto const smem = make_smem_ptr(static_cast<Element*>(nullptr));
  auto sQ = make_tensor(smem, typename Traits::SmemLayoutQ{});    // (64, D)
  auto sK = make_tensor(smem, typename Traits::SmemLayoutK{});    // (BLK_N, D, stage)
  auto sVt = make_tensor(smem, typename Traits::SmemLayoutVt{});  // (product, BLK_N, pieces, stage)
  // V as TMA writes it: (BLK_N, D, stage)
  using Loaded = decltype(tile_to_shape(typename Traits::template AtomOf<Traits::ColumnsV::kChunk>{},
                                        Shape<Int<kBlockN>, Int<kHeadDim>, Int<Traits::kStages>>{}));
  auto const cQ = make_identity_layout(Shape<Int<kRows>, Int<kHeadDim>>{});
  auto const cK = make_identity_layout(Shape<Int<kBlockN>, Int<kHeadDim>>{});
  auto const cVt = make_identity_layout(Shape<Int<Traits::kProduct * Traits::kPieces>, Int<kBlockN>>{});
  auto const cS = make_identity_layout(Shape<Int<kRows>, Int<kBlockN>>{});

  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  auto tSrQ = mma_qk.get_slice(0).partition_fragment_A(sQ);                     // (MMA, MMA_M, MMA_D)
  auto tSrK = mma_qk.get_slice(0).partition_fragment_B(sK);                     // (MMA, MMA_N, MMA_D, stage)
  auto tTrV = mma_pv.get_slice(0).partition_fragment_B(sVt);                    // (MMA, MMA_D, MMA_N, pieces, stage)
  auto tSrS = partition_fragment_C(mma_qk, Shape<Int<kRows>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
  // O's registers are those of a product of all of V's columns, without those of ones.
  auto const mma_o = make_tiled_mma(
      SM90::GMMA::rs_op_selector<E4M3, E4M3, float, Shape<Int<kRows>, Int<kHeadDim>, _32>>());

  return tuple_cat(
      smem_entry<"Q.smem">(typename Traits::SmemLayoutQ{}), smem_entry<"K.smem">(typename Traits::SmemLayoutK{}),
      smem_entry<"LoadedV.smem">(Loaded{}), smem_entry<"V.smem">(typename Traits::SmemLayoutVt{}),
      shared_a_entry<"Q.mma.coord">(mma_qk, cQ), index_entry<"Q.descriptor">(tSrQ.layout()),
      shared_b_entry<"K.mma.coord">(mma_qk, cK), index_entry<"K.descriptor">(tSrK.layout()),
      shared_b_entry<"V.mma.coord">(mma_pv, cVt), index_entry<"V.descriptor">(tTrV.layout()),
      mma_c_entry<"S.mma.coord">(mma_qk, cS), index_entry<"S.mma.register">(tSrS.layout()),
      index_entry<"S.mma.rowcol">(rowcol_layout(tSrS.layout())),  // (row, column) of a thread -> register
      mma_a_entry<"P.mma.coord">(mma_pv, cS), index_entry<"P.mma.register">(typename Traits::LayoutP{}),
      mma_c_entry<"O.mma.coord">(mma_o, cQ), index_entry<"O.mma.register">(typename Traits::LayoutO{}));
}

// (product, BLK_N, pieces, ...) -> (products, BLK_N, ...): a product is in the modes `inner` and `inner + 2`. Behind
// the columns of V there may be some of ones.
inline void merge_pieces(Array& array, int inner) {
  int before = 1;
  for (int i = 0; i < inner; ++i) before *= array.shape[i];
  int const piece = array.shape[inner], keys = array.shape[inner + 1], pieces = array.shape[inner + 2];
  int const slice = before * piece;
  std::vector<int> merged;
  for (size_t rest = 0; rest < array.data.size(); rest += slice * keys * pieces) {
    for (int n = 0; n < keys; ++n) {
      for (int i = 0; i < pieces; ++i) {
        auto const begin = array.data.begin() + rest + slice * (n + keys * i);
        merged.insert(merged.end(), begin, begin + slice);
      }
    }
  }
  array.shape[inner] *= pieces;
  array.shape.erase(array.shape.begin() + inner + 2);
  array.data = std::move(merged);
}

// "LoadedV.ldsm.address", "V.sts.address" (instruction, lane): bytes within a stage's buffer; "V.sts.byte" (16,
// instruction, lane): which of the bytes that a lane has loaded each one is that it stores. In the order of
// transpose_tile.
template <class Traits>
void add_transposition(Details& out) {
  constexpr int kKeyGroups = Traits::kBlockN / 32, kBlocks = kKeyGroups * (Traits::kHeadDimV / 16), kLanes = 32;
  Array loaded{{kBlocks, kLanes}, {}}, stored{{kBlocks, kLanes}, {}}, bytes{{16, kBlocks, kLanes}, {}};
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int number = 0; number < kBlocks; ++number) {
      ValueBlock<Traits> block;
      block.load(nullptr, number % kKeyGroups, number / kKeyGroups, lane);
      block.store(nullptr, number % kKeyGroups, number / kKeyGroups, lane);
      loaded.data.push_back(int(reinterpret_cast<size_t>(recorded_lane.loaded)));
      stored.data.push_back(int(reinterpret_cast<size_t>(recorded_lane.stored)));
      for (int i = 0; i < 16; ++i) bytes.data.push_back(recorded_lane.words[i / 4] >> 8 * (i % 4) & 0xff);
    }
  }
  out.arrays["LoadedV.ldsm.address"] = loaded;
  out.arrays["V.sts.address"] = stored;
  out.arrays["V.sts.byte"] = bytes;
}

template <class Traits>
Details describe() {
  using SharedStorage = typename Traits::SharedStorage;
  Details out;
  AddAll<decltype(entries<Traits>())>::add(out);
  merge_pieces(out.arrays["V.smem"], 0);
  merge_pieces(out.arrays["V.descriptor"], 1);

  // The register of P that has each score: (row, column) of a thread.
  Array& numerators = out.arrays["P.mma.numerator"];
  numerators.shape = {2, Traits::kBlockN / 4};
  for (int column = 0; column < Traits::kBlockN / 4; ++column) {
    for (int row = 0; row < 2; ++row) numerators.data.push_back(4 * word_of_numerators(row, column / 4) + column % 4);
  }
  add_transposition<Traits>(out);

  // Descriptors are made from addresses: of a SharedStorage at address 0.
  using Element = typename Traits::Element;
  auto at = [](size_t offset) { return make_smem_ptr(reinterpret_cast<Element*>(offset)); };
  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  constexpr size_t kQ = offsetof(SharedStorage, q), kK = offsetof(SharedStorage, k), kVt = offsetof(SharedStorage, vt);
  add_descriptor(out, "Q.descriptor",
                 mma_qk.get_slice(0).partition_fragment_A(make_tensor(at(kQ), typename Traits::SmemLayoutQ{})));
  add_descriptor(out, "K.descriptor",
                 mma_qk.get_slice(0).partition_fragment_B(make_tensor(at(kK), typename Traits::SmemLayoutK{})));
  add_descriptor(out, "V.descriptor",
                 mma_pv.get_slice(0).partition_fragment_B(make_tensor(at(kVt), typename Traits::SmemLayoutVt{})));

  int const ones = int(offsetof(SharedStorage, ones)), barriers = int(offsetof(SharedStorage, k_pipeline));
  out.buffers = {{"K", int(kK), int(sizeof(SharedStorage::k))},
                 {"LoadedV", int(offsetof(SharedStorage, v)), int(sizeof(SharedStorage::v))},
                 {"V", int(kVt), int(sizeof(SharedStorage::vt))},
                 {"Q", int(kQ), int(sizeof(SharedStorage::q))},
                 {"ones", ones, int(sizeof(SharedStorage::ones))},
                 {"barriers", barriers, Traits::kSmem.total - barriers}};
  out.facts["element_bytes"] = sizeof(Element);
  out.facts["box.columns"] = Traits::ColumnsQK::kChunk;
  out.facts["box.count"] = Traits::ColumnsQK::kChunks;
  add_atom<typename Traits::MmaQK::AtomShape_MNK>(out);
  return out;
}

// The tile table has two rows of a head dim: of plain scores, and of modified ones.
template <int kHeadDim, bool kModifies>
Array schedule(Problem const& problem, int num_sms) {
  constexpr KernelShape kShape = kernel_shape(kHeadDim, kHeadDim, kModifies);
  auto const params = params_of<FwdParams>(problem);
  TileOrder const order = sm90_forward::order_of(params, kShape, params.head_dim / 2, num_sms);
  bool const drawn =
      is_masked(params.band) && draws_tiles(sm90_forward::work_of(params, kHeadDim, num_sms), kShape);
  return sm90_forward::walks<kShape.block_m, kShape.block_n>(params, order, drawn, {}, num_sms);
}

template <int kHeadDim, bool kModifies>
Kernel kernel() {
  constexpr TileConfig kTile = tile_config(kHeadDim, kModifies);
  // The layouts depend neither on the formats nor on how the LSE is summed.
  constexpr Variant kVariant = kModifies ? Variant::kModified : Variant::kDense;
  using Traits = fp8_rows::Traits<kHeadDim, kHeadDim, kVariant, Formats<E4M3, E4M3, E4M3>, true>;
  return {.arch = "sm90",
          .folder = "forward/fp8_rows",
          .entry = kModifies ? "modified" : "plain",
          .entry_index = kModifies,
          .head_dim = kHeadDim,
          .tile = {{"block_m", kTile.block_m},
                   {"block_n", kTile.block_n},
                   {"pieces", kTile.pieces}},
          .shape = shape_of(kernel_shape(kHeadDim, kHeadDim, kModifies)),
          .facts = {{"block_m", Traits::kBlockM},
                    {"block_n", Traits::kBlockN},
                    {"threads", Traits::kThreads},
                    {"stages", Traits::kStages},
                    {"smem_bytes", Traits::kSmem.total},
                    {"smem_limit", SmemBytes::kLimit},
                    {"warpgroups", Traits::kWarpgroups},
                    {"warpgroup_rows", Traits::kRows},
                    {"producer_registers", Traits::kProducerRegs},
                    {"consumer_registers", Traits::kConsumerRegs},
                    {"product_registers", Traits::kProduct / 2 * kTile.buffers()},
                    {"packed", true}},
          .describe = &describe<Traits>,
          .schedule = &schedule<kHeadDim, kModifies>,
          .masked = &masked<FwdParams, false, typename Traits::MmaQK, 128, Traits::kWarpgroups, Traits::kRows,
                            Traits::kBlockN>,
          .packed_schedule = &sm90_forward::packed_schedule<Traits::kBlockM, Traits::kBlockN>};
}

template <int kHeadDim>
void add(Registry& registry) {
  registry.push_back(kernel<kHeadDim, false>());
  registry.push_back(kernel<kHeadDim, true>());
}

}  // namespace inspect::sm90_forward_fp8_rows
