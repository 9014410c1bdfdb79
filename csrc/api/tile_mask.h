// Makes of a call's mask what its kernel reads: contract/tile_mask.h.
#pragma once

#include "kernel_args.h"
#include "given_mask.h"

namespace flash_cute {

// Launches the kernels that fill the mask's parts of the workspace, and returns where they are. These also zero
// `zeroed` bytes from `counters` on. `problem` and `lengths` are the caller's.
TileMask launch_tile_mask(TileMaskPlan const& plan, FwdArgs const& args, Problem const& problem,
                          VarlenArgs const* lengths, Workspace const& workspace, Gpu gpu, cudaStream_t stream,
                          void* counters = nullptr, int64_t zeroed = 0);

}  // namespace flash_cute
