// The softcap, in kernels that serve calls with one and without.
#pragma once

#include "core/registers.cuh"
#include "core/score.cuh"

namespace flash_cute::split_keys {

// Once or never. A condition would be predicated, so that calls without a softcap wait for its instructions, too: in
// decoding a third of a tile's time.
template <class Scores>
CUTE_DEVICE void cap_scores_if_asked(Scores& scores, ScoreTerms const& terms) {
#pragma unroll 1
  for (int left = opaque(terms.softcap_scale != 0.f); left > 0; --left) cap_scores_by_tanh(scores, terms);
}

}  // namespace flash_cute::split_keys
