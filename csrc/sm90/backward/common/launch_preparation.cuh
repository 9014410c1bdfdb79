// Launches what comes before a backward's kernels: where sequences are read at run time the lists of their tiles, then
// the preprocess.
#pragma once

#include "core/bwd_preprocess.cuh"
#include "core/list_sequence_tiles.cuh"
#include "scores.cuh"

namespace flash_cute::sm90::backward {

// kBlockM: rows of the preprocess's tiles; kBlockN: keys of the listed ones. There are no sums of dQ to clear.
template <class Traits, int kBlockM, int kBlockN>
cudaError_t launch_preparation(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream) {
  constexpr bool kClearSums = false, kSequences = Traits::kVariant.reads_sequences;
  if constexpr (kSequences) {
    cudaError_t const error = launch_sequence_tiles<Traits::kListedRows, kBlockN>(params, stream);
    if (error != cudaSuccess) return error;
  }
  return launch_bwd_preprocess<typename Traits::Element, kBlockM, Traits::kHeadDim, StatOrder, kClearSums, kSequences>(
      plan, params, stream);
}

}  // namespace flash_cute::sm90::backward
