// A kernel family: the kernels of a folder of csrc/<arch>/, and what the host knows of them.
//
// The folder's family.h has a struct Family with the functions below, and api/families.cpp lists it. The planner asks
// each family that the GPU can run; it knows no kernel itself.
#pragma once

#include <string>
#include <vector>

#include "contract/plan.h"
#include "problem.h"

namespace flash_cute {

// The head dims of a kernel, of q and k and of v: it serves tensors with at most these.
struct HeadDims {
  int head_dim;
  int head_dim_v;
};

constexpr double kNoTime = 0;  // not predicted

// The best kernel of a family for a call.
struct Candidate {
  Choice choice;  // of entry and split
  double us = kNoTime;  // predicted, if the family had to predict it to choose
};

template <class PlanType>
struct FamilyOf {
  Backend backend;    // its architecture
  char const* name;   // its namespace in flash_cute, which is its folder of csrc/
  bool one_head_dim;  // q, k and v have one head dim: the tensors of the smaller one are padded by copies

  bool reads_float8;  // q, k and v are float8, else of 16 bits
  bool reads_masks;   // some kernels read a mask, see contract/tile_mask.h; `serves` says which
  bool row_invariant;  // serves those calls that ask for it

  // Whether the kernel of these head dims, which hold the tensors', serves the call.
  bool (*serves)(HeadDims, Problem const&);

  // The tile, and whether tiles are split: as asked for, or the best. `competes`: a kernel that came first serves the
  // call too.
  Candidate (*choose)(HeadDims, Problem const&, Choice const& asked, bool competes, Gpu);

  // The time that the choice takes, kNoTime where the model does not tell it.
  double (*predict)(HeadDims, Problem const&, Candidate const&, Gpu);

  // Fills in the plan, which has dtype, head dims and the choice's entry: the kernel, its shape, grid, order and
  // workspace. ctas or key_tiles stay 0 where there is nothing to launch.
  void (*plan)(PlanType&, Problem const&, Choice const&, Gpu);

  // The name of the plan's entry in the tile table, empty where there is one tile.
  char const* (*tile_name)(PlanType const&);

  // Why it is that tile: what follows "Tile of ...: the table's entry for head dim D".
  std::string (*why_tile)(PlanType const&, Problem const&, Gpu);

  // Further sentences about the plan.
  std::vector<std::string> (*notes)(PlanType const&, Problem const&);
};
using FwdFamily = FamilyOf<FwdPlan>;
using BwdFamily = FamilyOf<BwdPlan>;

template <class Family>
constexpr bool is_row_invariant() {
  return requires { Family::kRowInvariant; };
}

// The functions of a struct Family.
template <class Family, class PlanType>
constexpr FamilyOf<PlanType> family_of() {
  return {.backend = Family::kBackend,
          .name = Family::kName,
          .one_head_dim = Family::kOneHeadDim,
          .reads_float8 = Family::kReadsFloat8,
          .reads_masks = Family::kReadsMasks,
          .row_invariant = is_row_invariant<Family>(),
          .serves = &Family::serves,
          .choose = &Family::choose,
          .predict = &Family::predict,
          .plan = &Family::plan,
          .tile_name = &Family::tile_name,
          .why_tile = &Family::why_tile,
          .notes = &Family::notes};
}

// What a family inherits that has one tile, no prediction and nothing to say.
struct OneTile {
  static constexpr bool kOneHeadDim = false;
  static constexpr bool kReadsFloat8 = false;
  static constexpr bool kReadsMasks = false;
  static Candidate choose(HeadDims, Problem const&, Choice const& asked, bool, Gpu) {
    return {.choice = {.entry = 0, .split = asked.split}};
  }
  static double predict(HeadDims, Problem const&, Candidate const&, Gpu) { return kNoTime; }
  template <class PlanType>
  static char const* tile_name(PlanType const&) {
    return "";
  }
  template <class PlanType>
  static std::string why_tile(PlanType const&, Problem const&, Gpu) {
    return "";
  }
  template <class PlanType>
  static std::vector<std::string> notes(PlanType const&, Problem const&) {
    return {};
  }
};

}  // namespace flash_cute
