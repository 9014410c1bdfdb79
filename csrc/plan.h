// What the host decides before a launch, and what it then tells `explain`. No torch, no CuTe.
#pragma once

#include <cstdint>

#ifndef FLASH_CUTE_NO_CUDA
#include <cuda_runtime_api.h>
#else  // a build without kernels has no toolkit's headers; only the names are needed
using cudaError_t = int;
using cudaStream_t = void*;
#endif

#include "core/variant.h"
#include "params.h"

namespace flash_cute {

enum class DType { kFloat16, kBFloat16 };

// Names one compiled kernel of one architecture: (head_dim, causal) picks the instance file, `config`
// the entry of that architecture's tile table, dtype the half of it.
struct FwdPlan {
  DType dtype;
  int head_dim;  // the kernel's kHeadDim: the smallest instance that holds the tensor's
  bool causal;
  int config;    // index into the architecture's tile table; see <arch>/fwd_tile.h
};

// The figures of a planned kernel that a person wants to see.
struct KernelShape {
  int block_m;      // query rows a CTA (thread block) works on
  int block_n;      // keys a mainloop step
  int threads;      // a CTA
  int stages;       // K/V buffers in shared memory
  int smem_bytes;   // dynamic shared memory a CTA
  int ctas_per_sm;  // what the register budget was set for
  bool dq_in_registers = false;  // backward: a second kernel sums dQ there, and the workspace has no sums
};

struct BwdPlan {
  DType dtype;
  int head_dim;  // the kernel's kHeadDim
  bool causal;
  int config;    // index into the architecture's table; see <arch>/bwd_tile.h
};

// Where each part of the backward's workspace begins, in bytes; every part is 128-byte aligned.
struct BwdWorkspace {
  int64_t dq_acc;
  int64_t lse_log2;
  int64_t delta;
  int64_t semaphores;
  int64_t counters;
  int64_t bytes;
};

// `shape` is that of the planned backward kernel; `head_dim` the kernel's.
constexpr BwdWorkspace bwd_workspace(KernelShape const& shape, int head_dim, int64_t heads, int len_q) {
  auto const aligned = [](int64_t bytes) { return (bytes + 127) / 128 * 128; };
  int64_t const row_tiles = heads * ((int64_t{len_q} + shape.block_m - 1) / shape.block_m);
  int64_t const rows = row_tiles * shape.block_m;
  BwdWorkspace workspace{};
  workspace.lse_log2 = workspace.dq_acc + (shape.dq_in_registers ? 0 : aligned(4 * rows * head_dim));
  workspace.delta = workspace.lse_log2 + aligned(4 * rows);
  workspace.semaphores = workspace.delta + aligned(4 * rows);
  workspace.counters = workspace.semaphores + 4 * row_tiles;
  workspace.bytes = workspace.semaphores + (shape.dq_in_registers ? 0 : aligned(4 * (row_tiles + 1 + heads)));
  return workspace;
}

// The kernels: one explicit instantiation a (head dim, variant), in a generated file of its own
// (build/inst/<arch>_<fwd|bwd>_d<D>_<mask>.cu), holding both dtypes and every tile of the table.
namespace sm80::fwd {
template <int kHeadDim, class Variant>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream);
}
namespace sm80::bwd {
template <int kHeadDim, class Variant>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream);
}
namespace sm90::fwd {
template <int kHeadDim, class Variant>
cudaError_t launch(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream);
}
namespace sm90::bwd {
template <int kHeadDim, class Variant>
cudaError_t launch(BwdPlan const& plan, BwdParams const& params, cudaStream_t stream);
}

}  // namespace flash_cute
