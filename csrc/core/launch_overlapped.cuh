// Launches whose kernels may begin while the kernel before them ends (programmatic dependent launch): a kernel's CTAs
// start where there is room, and wait for the other kernel's results before they read any. Without the attribute, or
// before compute capability 9.0, a kernel begins when the one before has ended, and these functions do nothing.
#pragma once

#include <cuda_runtime.h>

namespace flash_cute {

// Whether a launch's kernel may begin early. It must call wait_for_kernel_before.
enum class Overlap { kNo, kYes };

// Waits until the kernel before has ended and its stores can be read. By each thread that reads or overwrites anything
// that it used.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets CTAs of the next kernel start, once all CTAs have called this or ended. After wait_for_kernel_before: so the
// next kernel, which waits for this one alone, waits for all before it too.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class... Params, class... Args>
cudaError_t launch_overlapped(Overlap overlap, void (*kernel)(Params...), unsigned ctas, unsigned threads,
                              size_t smem_bytes, cudaStream_t stream, Args const&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap == Overlap::kYes ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace flash_cute
