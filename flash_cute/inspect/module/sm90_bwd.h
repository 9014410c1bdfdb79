// The sm90 backward's traits as data: its budget and its masks. Up to head dim 128 one kernel makes all gradients; above,
// one makes dK and dV, and another dQ.
#pragma once

#include "describe.h"
#include "kernel_shape.h"
#include "problem.h"

#include "sm90/bwd/tile.h"
#include "sm90/bwd/traits.cuh"
#include "sm90/bwd_wide/tile.h"
#include "sm90/bwd_wide/traits.cuh"

namespace inspect::sm90_bwd {

using namespace flash_cute;

constexpr int kSmemLimit = 227 * 1024;

template <class Traits>
std::map<std::string, int> facts_of(int block_m, int block_n, size_t smem_bytes) {
  return {{"block_m", block_m},
          {"block_n", block_n},
          {"threads", Traits::kThreads},
          {"stages", Traits::kStages},
          {"smem_bytes", int(smem_bytes)},
          {"smem_limit", kSmemLimit},
          {"warpgroups", Traits::kWarpgroups},
          {"producer_registers", Traits::kProducerRegs},
          {"consumer_registers", Traits::kConsumerRegs}};
}

// What comes before the barriers, and those.
#define FLASH_CUTE_BUFFER(name, field) Buffer{name, int(offsetof(Storage, field)), int(sizeof(Storage::field))}
template <class Storage>
Details buffers_of(std::vector<Buffer> buffers) {
  int const end = buffers.back().offset + buffers.back().bytes;
  buffers.push_back({"the rest", end, int(sizeof(Storage)) - end});
  return {.buffers = buffers};
}

template <class Traits>
Details describe() {
  using Storage = typename Traits::SharedStorage;
  return buffers_of<Storage>({FLASH_CUTE_BUFFER("K", k), FLASH_CUTE_BUFFER("V", v), FLASH_CUTE_BUFFER("Q", q),
                              FLASH_CUTE_BUFFER("dO", dout), FLASH_CUTE_BUFFER("dS", ds),
                              FLASH_CUTE_BUFFER("dQ, then dK and dV", dq), FLASH_CUTE_BUFFER("LSE", lse_log2),
                              FLASH_CUTE_BUFFER("delta", delta)});
}
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
#undef FLASH_CUTE_BUFFER

template <int kHeadDim>
void add(Registry& registry) {
  if constexpr (kHeadDim <= sm90::bwd::kMaxHeadDim) {
    constexpr sm90::bwd::TileConfig kTile = sm90::bwd::tile_config(kHeadDim);
    using Traits = sm90::bwd::Traits<cutlass::half_t, kHeadDim, kTile>;
    registry.push_back(
        {.arch = "sm90",
         .folder = "bwd",
         .entry = "all",
         .entry_index = 0,
         .head_dim = kHeadDim,
         .tile = {{"block_m", kTile.block_m},
                  {"block_n", kTile.block_n},
                  {"stages", kTile.stages},
                  {"late_dp", kTile.late_dp},
                  {"v_steps", kTile.v_steps}},
         .shape = shape_of(sm90::bwd::kernel_shape(kHeadDim, kHeadDim)),
         .facts = facts_of<Traits>(Traits::kBlockM, Traits::kBlockN, sizeof(typename Traits::SharedStorage)),
         .describe = &describe<Traits>,
         .schedule = nullptr,
         .masked = &masked<BwdParams, true, typename Traits::MmaScores, Traits::kConsumerThreads, 1, Traits::kBlockM,
                           Traits::kBlockN>});
  } else {
    using Traits = sm90::bwd_wide::Traits<cutlass::half_t, kHeadDim>;
    constexpr int kRows = Traits::kBlockM, kKeys = Traits::kBlockN;
    KernelShape const keys = sm90::bwd_wide::kernel_shape(kHeadDim, kHeadDim);
    KernelShape queries = keys;
    queries.block_m = sm90::bwd_wide::kQueryTileRows;
    registry.push_back({.arch = "sm90",
                        .folder = "bwd_wide",
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
         .folder = "bwd_wide",
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
}

}  // namespace inspect::sm90_bwd
