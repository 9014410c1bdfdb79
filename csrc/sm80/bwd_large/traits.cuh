// Types of the sm80 backward for head dims above 256.
#pragma once

#include "../large/products.cuh"
#include "task.cuh"
#include "tile.h"

namespace flash_cute::sm80::bwd_large {

// kHeadDim: the largest that the kernel serves.
template <class Element_, int kHeadDim_>
struct Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kThreads = large::kThreads;
  using ScoreMma = large::ScoreMma<Element>;
  using OutMma = large::OutMma<Element>;

  struct Storage {
    alignas(1024) Element weights[kTileRows * kOtherRows];  // W
    float lse_log2[kOtherRows];  // of the query rows of a step, or of the CTA's
    float delta[kOtherRows];
    Task<Element> task;
  };
  static_assert(sizeof(Storage) <= kFixedBytes);
};

}  // namespace flash_cute::sm80::bwd_large
