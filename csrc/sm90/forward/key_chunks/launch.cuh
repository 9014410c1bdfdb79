// Launches a plan: by the launch for caches, whose file has the kernels. Included only by the generated instance files.
#pragma once

#include <cuda_runtime.h>

#include "contract/decode.h"
#include "contract/plan.h"

namespace flash_cute::sm90::decode::key_chunks {

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(DecodePlan const& plan, DecodeParams const& params, cudaStream_t stream);

}  // namespace flash_cute::sm90::decode::key_chunks

namespace flash_cute::sm90::forward::key_chunks {

template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream) {
  DecodePlan const tiles{.dtype = plan.dtype, .long_rows = 1, .num_sms = static_cast<int>(plan.ctas)};
  return decode::key_chunks::launch<kHeadDim, kHeadDimV>(tiles, DecodeParams{.forward = &params}, stream);
}

}  // namespace flash_cute::sm90::forward::key_chunks
