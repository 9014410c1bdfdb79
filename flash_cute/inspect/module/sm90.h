// The sm90 forward's traits as data. The partitions are those of sm90/fwd_mainloop.cuh and fwd_epilogue.cuh,
// from the same types.
#pragma once

#include <algorithm>

#include "describe.h"

#include "core/layout.cuh"
#include "core/mask.cuh"
#include "sm90/fwd_scheduler.cuh"
#include "sm90/fwd_traits.cuh"

namespace inspect::sm90 {

using namespace flash_cute;
using namespace flash_cute::sm90;

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

// The fields of a WGMMA matrix descriptor: bytes, and the swizzle as the hardware numbers it.
template <class Fragment>
void add_descriptor(Details& out, std::string const& name, Fragment const& fragment) {
  auto const bits = fragment.data().desc_.bitfield;
  out.facts[name + ".start"] = 16 * int(bits.start_address_);
  out.facts[name + ".leading"] = 16 * int(bits.leading_byte_offset_);
  out.facts[name + ".stride"] = 16 * int(bits.stride_byte_offset_);
  out.facts[name + ".swizzle"] = int(bits.layout_type_);
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
  int const barriers = int(offsetof(SharedStorage, k_pipeline));
  out.buffers.push_back({"barriers", barriers, int(sizeof(SharedStorage)) - barriers});

  out.facts["element_bytes"] = sizeof(Element);
  out.facts["box.columns"] = Traits::kChunk;
  out.facts["box.count"] = Traits::kChunks;
  out.facts["mma.m"] = size<0>(typename Traits::MmaQK::AtomShape_MNK{});
  out.facts["mma.n"] = size<1>(typename Traits::MmaQK::AtomShape_MNK{});
  out.facts["mma.k"] = size<2>(typename Traits::MmaQK::AtomShape_MNK{});
  return out;
}

// The layouts depend on neither the element type nor the mask: describe() is compiled once a tile.
template <class Traits>
struct CanonicalOf {
  using type = FwdTraits<cutlass::half_t, Traits::kHeadDim, Variant<FullMask>, Traits::kTile>;
  using Bfloat16 = FwdTraits<cutlass::bfloat16_t, Traits::kHeadDim, Variant<typename Traits::Mask>, Traits::kTile>;
  template <class Mma, class OtherMma>
  static constexpr bool kSameMma =
      std::is_same_v<decltype(Mma{}.get_layoutA_TV()), decltype(OtherMma{}.get_layoutA_TV())> &&
      std::is_same_v<decltype(Mma{}.get_layoutB_TV()), decltype(OtherMma{}.get_layoutB_TV())> &&
      std::is_same_v<decltype(Mma{}.get_layoutC_TV()), decltype(OtherMma{}.get_layoutC_TV())>;
  template <class Other>
  static constexpr bool kSameAs = std::is_same_v<typename type::SmemLayoutQ, typename Other::SmemLayoutQ> &&
                                  std::is_same_v<typename type::SmemLayoutK, typename Other::SmemLayoutK> &&
                                  std::is_same_v<typename type::SmemLayoutVt, typename Other::SmemLayoutVt> &&
                                  kSameMma<typename type::MmaQK, typename Other::MmaQK> &&
                                  kSameMma<typename type::MmaPV, typename Other::MmaPV> &&
                                  sizeof(typename type::SharedStorage) == sizeof(typename Other::SharedStorage);
  static_assert(kSameAs<Traits> && kSameAs<Bfloat16>, "a layout depends on the mask or the element type");
};

// The CTAs' walks. Where they draw tiles, the next goes to the one with the least work so far: its key tiles, and one for
// what a tile costs besides. Where tiles are dealt, those that fill no whole wave are split if that is worth it, memory
// permitting: what the plan knows of memory's speed is left out here.
template <class Traits>
Array schedule(FwdProblem const& problem, int ctas) {
  constexpr bool kCausal = std::is_same_v<typename Traits::Mask, CausalMask>;
  FwdParams const params = params_of(problem);
  auto const schedule = TileSchedule::make(params, Traits::kBlockM, kCausal, ctas);
  bool const drawn = kCausal && schedule.num_tiles() > ctas;
  int const keys = params.len_q > 0 ? std::max(0, Traits::Mask::column_limit(params, params.len_q - 1)) : 0;
  TileSplit split;
  if (!drawn && !(kCausal && keys < 2 * params.len_q)) {
    bool const equal = schedule.num_tiles() > ctas;
    split = split_last_wave(schedule.num_tiles(), ceil_div(keys, Traits::kBlockN), ctas, equal);
  }

  Array array{{10, 0}, {}};
  std::vector<int> rounds(ctas), work(ctas);
  auto const add = [&](TileCoord const volatile& tile, int cta) {
    KeyRange const range = key_range<typename Traits::Mask, Traits::kBlockM, Traits::kBlockN>(params, tile.m_block);
    int const begin = tile.keys.begin, end = std::max(begin, std::min(int(tile.keys.end), range.end));
    array.data.insert(array.data.end(), {tile.m_block, tile.head, tile.batch, range.unmasked, range.end, cta,
                                         rounds[cta]++, begin, end, tile.parts});
    work[cta] += end - begin + 1;
    ++array.shape[1];
  };
  TileCoord volatile tile;
  if (drawn) {
    for (int index = 0; index < schedule.num_tiles(); ++index) {
      schedule.place(index, tile);
      add(tile, int(std::min_element(work.begin(), work.end()) - work.begin()));
    }
    return array;
  }
  for (bool more = true; more;) {
    more = false;
    for (int cta = 0; cta < ctas; ++cta) {
      schedule.deal(split, cta, ctas, rounds[cta], tile);
      if (tile.m_block < 0) continue;
      add(tile, cta);
      more = true;
    }
  }
  return array;
}

template <class Traits>
Array masked(FwdProblem const& problem, int m_block, int n_block) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kRows = Traits::kRows;
  FwdParams const params = params_of(problem);
  typename Traits::MmaQK mma;
  auto const cS = make_identity_tensor(Shape<Int<kRows>, Int<kBlockN>>{});
  auto const tScS_0 = rowcol_view(mma.get_slice(_0{}).partition_C(cS));
  Array array{{kBlockM, kBlockN}, std::vector<int>(kBlockM * kBlockN)};
  for (int thread = 0; thread < Traits::kConsumerThreads; ++thread) {
    int const first_row = thread / 128 * kRows;
    auto tSrS = partition_fragment_C(mma, Shape<Int<kRows>, Int<kBlockN>>{});
    clear(tSrS);
    auto scores = rowcol_view(tSrS);
    auto const tScS = rowcol_view(mma.get_slice(thread % 128).partition_C(cS));
    apply_mask<typename Traits::Mask>(scores, tScS, tScS_0, params, m_block * kBlockM + first_row,
                                      n_block * kBlockN);
    for (int i = 0; i < size(scores); ++i) {
      auto const coord = tScS(i);
      array.data[first_row + get<0>(coord) + kBlockM * get<1>(coord)] += 1000 + (scores(i) < 0.f);
    }
  }
  return array;
}

template <int kHeadDim, class Mask, int kConfig>
Kernel kernel(char const* mask) {
  constexpr FwdTile tile = fwd_tile(kHeadDim, std::is_same_v<Mask, CausalMask>, kConfig);
  constexpr KernelShape shape = fwd_shape(kHeadDim, std::is_same_v<Mask, CausalMask>, kConfig);
  using Traits = FwdTraits<cutlass::half_t, kHeadDim, Variant<Mask>, tile>;
  return {.arch = "sm90",
          .mask = mask,
          .config = enumerator_name<Config(kConfig)>(),
          .config_index = kConfig,
          .head_dim = kHeadDim,
          .tile = {{"block_m", tile.block_m},
                   {"block_n", tile.block_n},
                   {"stages", tile.stages},
                   {"ping_pong", tile.ping_pong},
                   {"late_wait", tile.late_wait}},
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
                    {"smem_limit", 227 * 1024},
                    {"warpgroups", Traits::kWarpgroups},
                    {"warpgroup_rows", Traits::kRows},
                    {"producer_registers", Traits::kProducerRegs},
                    {"consumer_registers", Traits::kConsumerRegs}},
          .describe = &describe<typename CanonicalOf<Traits>::type>,
          .schedule = &schedule<Traits>,
          .column_limits = &column_limits<Mask>,
          .masked = &masked<Traits>};
}

template <int kHeadDim, class Mask, int... kConfigs>
void add_masked(Registry& registry, char const* mask, std::integer_sequence<int, kConfigs...>) {
  (registry.push_back(kernel<kHeadDim, Mask, kConfigs>(mask)), ...);
}

template <int kHeadDim>
void add(Registry& registry) {
  auto const configs = std::make_integer_sequence<int, kNumConfigs>{};
  add_masked<kHeadDim, FullMask>(registry, "full", configs);
  add_masked<kHeadDim, CausalMask>(registry, "causal", configs);
}

}  // namespace inspect::sm90
