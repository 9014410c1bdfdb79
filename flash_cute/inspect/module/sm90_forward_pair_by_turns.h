// The sm90 forward for head dims 321 to 512 as data. Q, K and V lie in shared memory in units, which are the stages of
// their tensors here; K and V in the same ones. The partitions are those of sm90/forward/pair_by_turns/mainloop.cuh,
// from the same types.
#pragma once

#include "describe.h"
#include "kernel_shape.h"
#include "problem.h"
#include "sm90_forward_operands.h"
#include "sm90_forward_pair.h"

#include "sm90/forward/pair_by_turns/tile.h"
#include "sm90/forward/pair_by_turns/traits.cuh"

namespace inspect::sm90_forward_pair_by_turns {

using namespace flash_cute;
using namespace flash_cute::sm90::forward::pair_by_turns;

constexpr sm90_forward::Operands kOperands = {.rows = kRows,
                                              .keys = kBlockN,
                                              .columns = kChunk,
                                              .columns_of_v = kChunk,
                                              .keys_of_v = kBlockN,
                                              .columns_of_out = kColumns};

template <class Traits>
Details describe() {
  using Storage = typename Traits::SharedStorage;
  Details out;
  AddAll<decltype(sm90_forward::entries<Traits, kOperands>())>::add(out);

  constexpr size_t kQ = offsetof(Storage, q), kRing = offsetof(Storage, units);  // Q is the first warpgroup's
  sm90_forward::add_descriptors<Traits>(out, kQ, kRing, kRing);

  int const received = int(offsetof(Storage, messages)), rest = int(offsetof(Storage, ring));
  out.buffers = {{"Q", int(kQ), int(sizeof(Storage::q))},
                 {"K and V", int(kRing), int(sizeof(Storage::units))},
                 {"from the other CTA", received, rest - received},
                 {"barriers", rest, int(sizeof(Storage)) - rest}};
  out.facts["element_bytes"] = sizeof(typename Traits::Element);
  out.facts["box.columns"] = kChunk;
  add_atom<typename Traits::MmaQK::AtomShape_MNK>(out);
  return out;
}

template <int kHeadDim>
void add(Registry& registry) {
  using Traits = sm90::forward::pair_by_turns::Traits<cutlass::half_t, kHeadDim, Variant::kPacked>;
  registry.push_back({.arch = "sm90",
                      .folder = "forward/pair_by_turns",
                      .entry = "",
                      .entry_index = 0,
                      .head_dim = kHeadDim,
                      .tile = {{"parts", Traits::kCtas},
                               {"turns", Traits::kCtas},
                               {"unit_columns", kChunk},
                               {"unit_columns_of_v", kChunk},
                               {"unit_keys", kBlockN},
                               {"units_of_v", kUnitsOfV},
                               {"units", kUnits},
                               {"columns_of_o", kColumns},
                               {"message_bytes", kMessageBytes}},
                      .shape = shape_of(kernel_shape()),
                      .facts = sm90_forward_pair::facts<Traits>(),
                      .describe = &describe<Traits>,
                      .schedule = &sm90_forward_pair::schedule<Traits>,
                      .masked = &masked<FwdParams, false, typename Traits::MmaQK, 128, Traits::kWarpgroups, kRows,
                                        kBlockN>,
                      .packed_schedule = &sm90_forward_pair::packed_schedule<Traits>});
}

}  // namespace inspect::sm90_forward_pair_by_turns
