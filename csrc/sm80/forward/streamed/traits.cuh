// Types of the sm80 forward for head dims above 256.
#pragma once

#include "contract/variant.h"
#include "sm80/forward/rows/traits.cuh"
#include "sm80/streaming/products.cuh"
#include "pair.cuh"
#include "tile.h"

namespace flash_cute::sm80::forward::streamed {

using namespace cute;

// Of CTAs without partners. kHeadDim: the largest that the kernel serves.
template <class Element_, int kHeadDim_>
struct Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = streaming::kBlockM;
  static constexpr int kBlockN = streaming::kBlockN;
  static constexpr int kThreads = streaming::kThreads;
  static constexpr Variant kVariant = Variant::kModified;
  static constexpr bool kSearchesOffsets = false;  // with it, it spills
  static constexpr bool kPaired = false;
  using Partner = Alone;
  using ScoreMma = streaming::ScoreMma<Element>;
  using OutMma = streaming::OutMma<Element>;
  static constexpr int kKeyWarps = 4;  // that share a row of scores

  struct Storage {
    alignas(1024) Element weights[kBlockM * kBlockN];  // P
    float row_max[kKeyWarps][kBlockM];                 // at the end: the sums of the numerators
    float row_error[kKeyWarps][kBlockM];               // of the largest numerators, at the end
    float offset[kBlockM];  // the maximum in use times scale_log2
    float limit[kBlockM];   // the row takes a new maximum when a raw score exceeds this
    float factor[kBlockM];  // what rescales the row; at the end: what normalizes it
    float other_factor[kBlockM];  // the same, of what the partner sends
    forward::SequenceTile tile;
    int ticket;
    Element const* q;  // of the tile's first row
    Element const* k;  // of the sequence's first key
    Element const* v;  // the same, from the CTA's first column on
  };
  static_assert(sizeof(Storage) <= kFixedBytes);
};

// Of CTAs in pairs.
template <class Element_, int kHeadDim_>
struct PairTraits : Traits<Element_, kHeadDim_> {
  static constexpr bool kPaired = true;
  using Partner = Pair;
};

}  // namespace flash_cute::sm80::forward::streamed
