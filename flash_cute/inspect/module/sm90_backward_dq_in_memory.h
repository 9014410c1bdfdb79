// The sm90 backward up to head dim 128 as data, of which one kernel makes all gradients: its budget and its masks.
#pragma once

#include "sm90_backward.h"

#include "sm90/backward/dq_in_memory/tile.h"
#include "sm90/backward/dq_in_memory/traits.cuh"

namespace inspect::sm90_backward_dq_in_memory {

using namespace sm90_backward;
namespace kernel = flash_cute::sm90::backward::dq_in_memory;

template <class Traits>
Details describe() {
  using Storage = typename Traits::SharedStorage;
  return buffers_of<Storage>({FLASH_CUTE_BUFFER("K", k), FLASH_CUTE_BUFFER("V", v), FLASH_CUTE_BUFFER("Q", q),
                              FLASH_CUTE_BUFFER("dO", dout), FLASH_CUTE_BUFFER("dS", ds),
                              FLASH_CUTE_BUFFER("dQ, then dK and dV", dq), FLASH_CUTE_BUFFER("LSE", lse_log2),
                              FLASH_CUTE_BUFFER("delta", delta)});
}

template <int kHeadDim>
void add(Registry& registry) {
  constexpr kernel::TileConfig kTile = kernel::tile_config(kHeadDim);
  using Traits = kernel::Traits<cutlass::half_t, kHeadDim, kTile>;
  registry.push_back(
      {.arch = "sm90",
       .folder = "backward/dq_in_memory",
       .entry = "all",
       .entry_index = 0,
       .head_dim = kHeadDim,
       .tile = {{"block_m", kTile.block_m},
                {"block_n", kTile.block_n},
                {"stages", kTile.stages},
                {"late_dp", kTile.late_dp},
                {"v_steps", kTile.v_steps}},
       .shape = shape_of(kernel::kernel_shape(kHeadDim, kHeadDim)),
       .facts = facts_of<Traits>(Traits::kBlockM, Traits::kBlockN, sizeof(typename Traits::SharedStorage)),
       .describe = &describe<Traits>,
       .schedule = nullptr,
       .masked = &masked<BwdParams, true, typename Traits::MmaScores, Traits::kConsumerThreads, 1, Traits::kBlockM,
                         Traits::kBlockN>});
}

}  // namespace inspect::sm90_backward_dq_in_memory
