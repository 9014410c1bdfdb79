// What the host decides before a launch: the launch, `explain` and the tests all read it. No torch, no CuTe.
#pragma once

#include <algorithm>
#include <cstdint>

#ifndef FLASH_CUTE_NO_CUDA
#include <cuda_runtime_api.h>
#else  // a build without kernels has no CUDA headers; only the names are needed
using cudaError_t = int;
using cudaStream_t = void*;
#endif

#include "core/accumulate.h"
#include "core/kernel_shape.h"
#include "core/variant.h"
#include "params.h"

namespace flash_cute {

enum class DType { kFloat16, kBFloat16 };

// Where each part of a workspace begins, in bytes; every part is 128-byte aligned.
struct FwdWorkspace {
  int64_t ticket;
  int64_t part_flags;
  int64_t parts;
  int64_t tiles_before;
  int64_t zeroed;  // the first `zeroed` bytes are set to 0 before the kernel reads them
  int64_t bytes;
};

struct BwdWorkspace {
  int64_t dq_acc;
  int64_t lse_log2;
  int64_t delta;
  int64_t semaphores;
  int64_t counters;
  int64_t drawn;
  int64_t sink_parts;
  int64_t scaled_dout;
  int64_t dq_queue;
  int64_t row_sequence;
  int64_t key_sequence;
  int64_t records;
  int64_t totals;
  int64_t pairs;
  int64_t bytes;
};

// head_dim and head_dim_v select the instance file of an architecture; dtype, variant and `entry` the kernel in it.
struct FwdPlan {
  DType dtype;
  Variant variant;
  Accumulate accumulate;
  int head_dim;    // the kernel's kHeadDim: the smallest instance that holds the tensor's
  int head_dim_v;  // the kernel's kHeadDimV
  int entry;     // of the architecture's tile table, see <arch>/fwd/tile.h
  KernelShape shape;
  int64_t ctas;
  TileOrder order;
  int tile_heads;  // see FwdParams
  int column_parts;  // large head dims: CTAs per row tile, each of which computes so much of out's columns
  TileSplit split;
  bool draws_tiles;
  bool pairs_ctas;    // sm80, large head dims: two CTAs work together on row tiles, see sm80/large/pair.cuh
  int64_t row_tiles;  // with it: of all heads; of packed sequences at most
  FwdWorkspace workspace;
};

struct BwdPlan {
  DType dtype;
  Variant variant;
  int head_dim;    // the kernel's kHeadDim
  int head_dim_v;  // the kernel's kHeadDimV
  int entry;       // of the architecture's tile table, see <arch>/bwd/tile.h
  KernelShape shape;
  bool deterministic;
  bool scales_dout;   // see BwdParams::scaled_dout
  // Packed sequences are processed in parts, one launch after the other in the same workspace, where a row tile per
  // short sequence would make it far larger than the tensors. What follows is of a part.
  int parts;
  int sequences_per_part;
  int m_blocks;       // where sequences are read at run time: of all of them, at most
  int n_blocks;
  int64_t row_tiles;  // of all heads
  int64_t key_tiles;
  int64_t ctas;       // of the kernel that computes dK and dV
  int64_t dq_ctas;    // of the kernel that computes dQ, or converts its float32 sums; 0 where there is none
  int key_pairs;      // sm80, large head dims: pairs of CTAs that compute dK and dV together, see
                      // sm80/bwd_large/pair.cuh; 0: each CTA works alone
  int row_pairs;      // the same of dQ
  sm80::bwd::LaunchOrder launch_order;
  sm90::bwd::TaskOrder task_order;
  TileSplit split;
  BwdWorkspace workspace;
};

// The kernels: one explicit instantiation per (architecture, kernel, head dim), each in its own generated file
// (build/inst/<arch>_<kernel>_d<D>.cu) with both dtypes and every tile of the table.
namespace sm80::fwd {
template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream);
}
namespace sm80::bwd {
template <int kHeadDim, int kHeadDimV>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream);
}
namespace sm80::fwd_large {
template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream);
}
namespace sm80::bwd_large {
template <int kHeadDim, int kHeadDimV>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream);
}
namespace sm90::fwd {
template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream);
}
namespace sm90::bwd {
template <int kHeadDim, int kHeadDimV>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream);
}
namespace sm90::bwd_wide {
template <int kHeadDim, int kHeadDimV>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream);
}
namespace sm90::fwd_wide {
template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream);
}
namespace sm90::fwd_large {
template <int kHeadDim, int kHeadDimV>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream);
}
namespace sm90::bwd_large {
template <int kHeadDim, int kHeadDimV>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream);
}

}  // namespace flash_cute
