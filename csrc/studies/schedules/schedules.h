// The launches of the schedules, as the operator sees them; each head dim of each is instantiated in a file of its own.
#pragma once

#include "contract/plan.h"
#include "tile.h"

namespace flash_cute::studies::schedules {

// kHeadDim is one of kHeadDims, at most max_head_dim(kSchedule); params.order has `row_tiles` tiles.
template <Schedule kSchedule, int kHeadDim>
cudaError_t launch(DType dtype, int64_t row_tiles, FwdParams const& params, cudaStream_t stream);

}  // namespace flash_cute::studies::schedules
