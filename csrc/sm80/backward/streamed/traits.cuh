// Types of the sm80 backward for head dims above 256.
#pragma once

#include "sm80/streaming/products.cuh"
#include "pair.cuh"
#include "task.cuh"
#include "tile.h"
#include "turns.cuh"

namespace flash_cute::sm80::backward::streamed {

// Of CTAs without partners. kHeadDim: the largest that the kernel serves.
template <class Element_, int kHeadDim_>
struct Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kThreads = streaming::kThreads;
  static constexpr bool kPaired = false;
  using Partner = Alone;
  using ScoreMma = streaming::ScoreMma<Element>;
  using OutMma = streaming::OutMma<Element>;

  struct Storage {
    using Task = streamed::Task<Element>;
    alignas(1024) Element weights[kTileRows * kOtherRows];  // W
    float lse_log2[kOtherRows];  // of the query rows of a step, or of the CTA's
    float delta[kOtherRows];
    Task task;
  };
  static_assert(sizeof(Storage) <= kFixedBytes);
  template <Side kSide>
  using Turns = LoneTurns<Storage, kSide>;
};

// Of CTAs in pairs.
template <class Element_, int kHeadDim_>
struct PairTraits : Traits<Element_, kHeadDim_> {
  static constexpr bool kPaired = true;
  using Partner = Exchange;

  struct Storage : Traits<Element_, kHeadDim_>::Storage {
    PairState pair;
  };
  static_assert(sizeof(Storage) <= kFixedBytes);
  template <Side kSide>
  using Turns = PairTurns<Storage, kSide>;
};

}  // namespace flash_cute::sm80::backward::streamed
