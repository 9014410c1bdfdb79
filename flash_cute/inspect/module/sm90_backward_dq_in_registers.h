// The sm90 backward above head dim 128 as data, of which one kernel makes dK and dV, and another dQ: budgets and masks.
#pragma once

#include "sm90_backward.h"

#include "sm90/backward/dq_in_registers/tile.h"
#include "sm90/backward/dq_in_registers/traits.cuh"

namespace inspect::sm90_backward_dq_in_registers {

using namespace sm90_backward;
namespace kernel = flash_cute::sm90::backward::dq_in_registers;

template <class Traits>
Details describe_keys() {
  using Storage = typename Traits::KeysStorage;
  return buffers_of<Storage>({FLASH_CUTE_BUFFER("K, then dV", k), FLASH_CUTE_BUFFER("V, then dK", v),
                              FLASH_CUTE_BUFFER("Q", q), FLASH_CUTE_BUFFER("dO", dout), FLASH_CUTE_BUFFER("P", p),
                              FLASH_CUTE_BUFFER("LSE", lse_log2), FLASH_CUTE_BUFFER("delta", delta)});
}
template <class Traits>
Details describe_queries() {
  using Storage = typename Traits::QueriesStorage;
  return buffers_of<Storage>({FLASH_CUTE_BUFFER("Q, then dQ", q), FLASH_CUTE_BUFFER("dO", dout),
                              FLASH_CUTE_BUFFER("K", k), FLASH_CUTE_BUFFER("V", v)});
}

template <int kHeadDim>
void add(Registry& registry) {
  using Traits = kernel::Traits<cutlass::half_t, kHeadDim>;
  constexpr int kRows = Traits::kBlockM, kKeys = Traits::kBlockN;
  KernelShape const keys = kernel::kernel_shape(kHeadDim, kHeadDim);
  KernelShape queries = keys;
  queries.block_m = kernel::kQueryTileRows;
  registry.push_back({.arch = "sm90",
                      .folder = "backward/dq_in_registers",
                      .entry = "keys",
                      .entry_index = 0,
                      .head_dim = kHeadDim,
                      .tile = {},
                      .shape = shape_of(keys),
                      .facts = facts_of<Traits>(kRows, kKeys, sizeof(typename Traits::KeysStorage)),
                      .describe = &describe_keys<Traits>,
                      .schedule = nullptr,
                      .masked = &masked<BwdParams, true, typename Traits::MmaScores, 128, 1, kRows, kKeys>});
  registry.push_back(
      {.arch = "sm90",
       .folder = "backward/dq_in_registers",
       .entry = "queries",
       .entry_index = 0,
       .head_dim = kHeadDim,
       .tile = {},
       .shape = shape_of(queries),
       .facts = facts_of<Traits>(queries.block_m, kKeys, sizeof(typename Traits::QueriesStorage)),
       .describe = &describe_queries<Traits>,
       .schedule = nullptr,
       .masked = &masked<BwdParams, false, typename Traits::MmaScores, 128, Traits::kWarpgroups, kRows, kKeys>});
}

}  // namespace inspect::sm90_backward_dq_in_registers
