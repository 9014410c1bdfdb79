#pragma once

namespace flash_cute {

// Where the power of two comes from that the scores of a row past OnlineSoftmax::kFused are multiplied by: from the
// parameters; computed where it is needed; or from the parameters, with a vote at every tile for such rows, where there
// is no lagging maximum. Kernels at the limit of their registers have the one with which they do not spill, by trial.
enum class PowerScale { kGiven, kComputed, kVoted };

}  // namespace flash_cute
