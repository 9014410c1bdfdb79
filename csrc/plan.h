// What the host decides before a launch, and what it then tells `explain`. No torch, no CuTe.
#pragma once

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
};

// The kernels: one explicit instantiation a (head dim, variant), in a generated file of its own
// (build/inst/<arch>_fwd_d<D>_<mask>.cu), holding both dtypes and every tile of the table.
namespace sm80 {
template <int kHeadDim, class Variant>
cudaError_t launch_fwd(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream);
}
namespace sm90 {
template <int kHeadDim, class Variant>
cudaError_t launch_fwd(FwdPlan const& plan, FwdParams const& params, cudaStream_t stream);
}

}  // namespace flash_cute
