// What the sm90 forwards for large head dims share: their facts, and row tiles that are drawn by clusters.
#pragma once

#include <algorithm>

#include "describe.h"
#include "problem.h"
#include "sm90_forward_packed.h"

namespace inspect::sm90_forward_pair {

using namespace flash_cute;

// The clusters' walks, as the kernel's scheduler makes them, in the order of the tickets.
template <class Traits>
Array schedule(Problem const& problem, int num_sms) {
  auto params = params_of<FwdParams>(problem);
  int ticket = 0;
  params.ticket = &ticket;
  params.head_dim = params.head_dim_v = Traits::kHeadDim;
  // The scheduler makes the band from a window around the row with the same number.
  params.sequences.window_left = problem.lower == -kNoLimit ? kNoLimit : -problem.lower;
  params.sequences.window_right = problem.upper;
  constexpr int kBlockM = Traits::kBlockM;
  int const tiles = params.batch * params.heads_q * ((params.len_q + kBlockM - 1) / kBlockM);
  int const slots = std::max(1, num_sms / Traits::kCtas);
  params.draws_tiles = tiles > slots;
  Array const drawn = sm90_forward::drawn_tiles<kBlockM, Traits::kBlockN>(params, std::min(tiles, slots));

  constexpr int kFields = 11, kEnd = 6, kCta = 7, kTicket = 8;
  std::vector<int const*> in_order(tiles);
  std::vector<int> rounds(tiles);
  for (int i = 0, round = 0; i < tiles; ++i) {
    int const* const tile = drawn.data.data() + kFields * i;
    round = i > 0 && tile[kCta] == tile[kCta - kFields] ? round + 1 : 0;
    in_order[tile[kTicket]] = tile;
    rounds[tile[kTicket]] = round;
  }
  Array array{{12, tiles}, {}};
  for (int i = 0; i < tiles; ++i) {
    int const* const tile = in_order[i];
    array.data.insert(array.data.end(), tile, tile + kEnd + 1);
    array.data.insert(array.data.end(), {tile[kCta], rounds[i], tile[3], tile[kEnd], 0});
  }
  return array;
}

template <class Traits>
auto facts() -> decltype(Kernel::facts) {
  return {{"block_m", Traits::kBlockM},
          {"block_n", Traits::kBlockN},
          {"threads", Traits::kThreads},
          {"stages", 1},
          {"smem_bytes", int(sizeof(typename Traits::SharedStorage))},
          {"smem_limit", 227 * 1024},
          {"warpgroups", Traits::kWarpgroups},
          {"warpgroup_rows", Traits::kRows},
          {"producer_registers", Traits::kProducerRegs},
          {"consumer_registers", Traits::kConsumerRegs},
          {"ctas_per_tile", Traits::kCtas},
          {"packed", 1}};
}

template <class Traits>
Array packed_schedule(PackedProblem const& problem, int num_sms) {
  return sm90_forward::packed_schedule<Traits::kBlockM, Traits::kBlockN>(problem, std::max(1, num_sms / Traits::kCtas));
}

}  // namespace inspect::sm90_forward_pair
