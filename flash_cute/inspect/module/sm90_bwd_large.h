// The sm90 backward for large head dims as data: the budgets and masks of the kernel of dK and dV and of that of dQ.
#pragma once

#include "describe.h"
#include "kernel_shape.h"
#include "problem.h"

#include "sm90/bwd_large/tile.h"
#include "sm90/bwd_large/traits.cuh"

namespace inspect::sm90_bwd_large {

using namespace flash_cute;
using namespace flash_cute::sm90::bwd_large;

#define FLASH_CUTE_BUFFER(name, field) Buffer{name, int(offsetof(Storage, field)), int(sizeof(Storage::field))}
template <class Storage>
Details with_rest(std::vector<Buffer> buffers) {
  int const end = buffers.back().offset + buffers.back().bytes;
  buffers.push_back({"statistics, barriers", end, int(sizeof(Storage)) - end});
  return {.buffers = buffers};
}
template <class Traits>
Details describe_keys() {
  using Storage = typename Traits::KeysStorage;
  return with_rest<Storage>({FLASH_CUTE_BUFFER("K, then dV", k), FLASH_CUTE_BUFFER("V, then dK", v),
                             FLASH_CUTE_BUFFER("Q", q), FLASH_CUTE_BUFFER("dO", dout),
                             FLASH_CUTE_BUFFER("S, then P", parts_of_s), FLASH_CUTE_BUFFER("dP", parts_of_dp)});
}
template <class Traits>
Details describe_queries() {
  using Storage = typename Traits::QueriesStorage;
  return with_rest<Storage>({FLASH_CUTE_BUFFER("Q, then dQ", q), FLASH_CUTE_BUFFER("dO", dout),
                             FLASH_CUTE_BUFFER("K", k), FLASH_CUTE_BUFFER("V", v),
                             FLASH_CUTE_BUFFER("S", parts_of_s), FLASH_CUTE_BUFFER("dP, then dS", parts_of_dp)});
}
#undef FLASH_CUTE_BUFFER

template <int kHeadDim>
void add(Registry& registry) {
  using Traits = sm90::bwd_large::Traits<cutlass::half_t, kHeadDim, Variant::kPacked>;
  auto const push = [&](char const* entry, int stages, Details (*describe)(), auto masked) {
    registry.push_back({.arch = "sm90",
                        .folder = "bwd_large",
                        .entry = entry,
                        .entry_index = 0,
                        .head_dim = kHeadDim,
                        .tile = {{"parts", Traits::kCtas}, {"columns", Traits::kColumns}},
                        .shape = shape_of(kernel_shape(kHeadDim)),
                        .facts = {{"block_m", kTileRows},
                                  {"block_n", kTileRows},
                                  {"threads", Traits::kThreads},
                                  {"stages", stages},
                                  {"smem_bytes", Traits::kSmemBytes},
                                  {"smem_limit", 227 * 1024},
                                  {"warpgroups", 2},
                                  {"producer_registers", Traits::kProducerRegs},
                                  {"consumer_registers", Traits::kConsumerRegs},
                                  {"ctas_per_tile", Traits::kCtas}},
                        .describe = describe,
                        .schedule = nullptr,
                        .masked = masked});
  };
  using Mma = typename Traits::MmaScores;
  push("keys", Traits::kStagesOfRows, &describe_keys<Traits>,
       &masked<BwdParams, true, Mma, 128, 1, kTileRows, kTileRows>);
  push("queries", Traits::kStagesOfKeys, &describe_queries<Traits>,
       &masked<BwdParams, false, Mma, 128, 1, kTileRows, kTileRows>);
}

}  // namespace inspect::sm90_bwd_large
