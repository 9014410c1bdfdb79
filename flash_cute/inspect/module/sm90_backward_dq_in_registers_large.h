// The sm90 backward for large head dims as data: the budgets and masks of the kernel of dK and dV and of that of dQ.
// Up to head dim 320 a tile has one CTA; above it a cluster of CTAs of two sides, whose shared memory is alike.
#pragma once

#include "describe.h"
#include "kernel_shape.h"
#include "problem.h"

#include "sm90/backward/dq_in_registers_large/side_traits.cuh"
#include "sm90/backward/dq_in_registers_large/tile.h"
#include "sm90/backward/dq_in_registers_large/traits.cuh"

namespace inspect::sm90_backward_dq_in_registers_large {

using namespace flash_cute;
using namespace flash_cute::sm90::backward::dq_in_registers_large;

#define FLASH_CUTE_BUFFER(name, field) Buffer{name, int(offsetof(Storage, field)), int(sizeof(Storage::field))}
template <class Storage>
Details with_rest(std::vector<Buffer> buffers, char const* rest) {
  int const end = buffers.back().offset + buffers.back().bytes;
  buffers.push_back({rest, end, int(sizeof(Storage)) - end});
  return {.buffers = buffers};
}
template <class Traits>
Details describe_keys() {
  using Storage = typename Traits::KeysStorage;
  return with_rest<Storage>({FLASH_CUTE_BUFFER("K, then dV", k), FLASH_CUTE_BUFFER("V, then dK", v),
                             FLASH_CUTE_BUFFER("Q", q), FLASH_CUTE_BUFFER("dO", dout), FLASH_CUTE_BUFFER("P", p)},
                            "statistics, barriers");
}
template <class Traits>
Details describe_queries() {
  using Storage = typename Traits::QueriesStorage;
  return with_rest<Storage>({FLASH_CUTE_BUFFER("Q, then dQ", q), FLASH_CUTE_BUFFER("dO", dout),
                             FLASH_CUTE_BUFFER("K", k), FLASH_CUTE_BUFFER("V", v), FLASH_CUTE_BUFFER("dS", ds)},
                            "barriers");
}
template <class Traits>
Details describe_keys_side() {
  using Storage = typename Traits::KeysStorage;
  return with_rest<Storage>({FLASH_CUTE_BUFFER("K or V, then dK or dV", resident), FLASH_CUTE_BUFFER("Q or dO", stream),
                             FLASH_CUTE_BUFFER("parts of S and dP", parts), FLASH_CUTE_BUFFER("P or dS", fragments)},
                            "barriers");
}
template <class Traits>
Details describe_queries_side() {
  using Storage = typename Traits::QueriesStorage;
  return with_rest<Storage>({FLASH_CUTE_BUFFER("Q or dO, then dQ", resident), FLASH_CUTE_BUFFER("K or V", stream),
                             FLASH_CUTE_BUFFER("parts of S and dP", parts), FLASH_CUTE_BUFFER("dS", fragments)},
                            "barriers");
}
#undef FLASH_CUTE_BUFFER

// The kernel "keys", of dK and dV, or "queries", of dQ, without its types' `describe` and `masked`.
template <class Traits>
Kernel kernel_of(char const* entry, int head_dim, int sides, int columns_of_sums) {
  return {.arch = "sm90",
          .folder = "backward/dq_in_registers_large",
          .entry = entry,
          .entry_index = 0,
          .head_dim = head_dim,
          .tile = {{"parts", Traits::kCtas},
                   {"sides", sides},
                   {"columns", Traits::kColumns},
                   {"columns_of_sums", columns_of_sums}},  // of a warpgroup
          .shape = shape_of(kernel_shape(head_dim)),
          .facts = {{"block_m", kTileRows},
                    {"block_n", kTileRows},
                    {"threads", Traits::kThreads},
                    {"smem_bytes", Traits::kSmemBytes},
                    {"smem_limit", 227 * 1024},
                    {"warpgroups", 2},  // that multiply
                    {"producer_registers", Traits::kProducerRegs},
                    {"ctas_per_tile", Traits::kCtas}},
          .schedule = nullptr};
}

template <int kHeadDim>
void add_one_cta(Registry& registry) {
  using Traits = sm90::backward::dq_in_registers_large::Traits<cutlass::half_t, kHeadDim, Variant::kPacked>;
  using Mma = typename Traits::MmaScores;
  Kernel keys = kernel_of<Traits>("keys", kHeadDim, 1, Traits::kColumns);
  keys.facts["consumer_registers"] = Traits::kConsumerRegs;
  Kernel queries = keys;
  queries.entry = "queries";
  keys.facts["stages"] = kStagesOfQ;
  keys.describe = &describe_keys<Traits>;
  keys.masked = &masked<BwdParams, true, Mma, 128, 1, kTileRows, kTileRows>;
  queries.facts["stages"] = kStagesOfKeys;
  queries.describe = &describe_queries<Traits>;
  queries.masked = &masked<BwdParams, false, Mma, 128, 1, kTileRows, kTileRows>;
  registry.insert(registry.end(), {keys, queries});
}

// Each CTA makes P and dS of a piece of the scores: some of the rows of their transposes, or some of the keys.
template <int kHeadDim>
void add_sides(Registry& registry) {
  using Traits = SideTraits<cutlass::half_t, kHeadDim, Variant::kPacked>;
  using Mma = typename Traits::MmaPiece;
  constexpr int kPieces = Traits::kCtas, kColumns = Traits::kPieceColumns;
  Kernel keys = kernel_of<Traits>("keys", kHeadDim, kSides, Traits::kUnitsOfSums * Traits::kUnitColumns);
  keys.facts["stages"] = Traits::kStages;
  keys.facts["consumer_registers"] = Traits::kProductsRegs;
  keys.facts["scores_registers"] = Traits::kScoresRegs;
  keys.facts["pieces"] = kPieces;
  Kernel queries = keys;
  queries.entry = "queries";
  keys.describe = &describe_keys_side<Traits>;
  keys.masked = &masked<BwdParams, true, Mma, 128, kPieces, kColumns, kTileRows>;
  queries.describe = &describe_queries_side<Traits>;
  queries.masked = &masked<BwdParams, false, Mma, 128, 1, kTileRows, kColumns, kPieces>;
  registry.insert(registry.end(), {keys, queries});
}

template <int kHeadDim>
void add(Registry& registry) {
  if constexpr (has_sides(kHeadDim)) {
    add_sides<kHeadDim>(registry);
  } else {
    add_one_cta<kHeadDim>(registry);
  }
}

}  // namespace inspect::sm90_backward_dq_in_registers_large
