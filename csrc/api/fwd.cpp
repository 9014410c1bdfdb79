// The forward on CUDA: check, plan, allocate, launch. Nothing here outlives a call, so any number of
// threads, streams and graph captures may be in it at once.
#include "fwd.h"

#ifdef FLASH_CUTE_NO_CUDA

namespace flash_cute {

FwdResult fwd_cuda(FwdArgs const&) {
  throw std::runtime_error("flash_cute: this build has no CUDA kernels (it was built with FLASH_CUTE_NO_CUDA)");
}

Gpu device_gpu(int) {
  throw std::runtime_error("flash_cute: this build has no CUDA kernels (it was built with FLASH_CUTE_NO_CUDA)");
}

}  // namespace flash_cute

#else

#include <torch/csrc/stable/accelerator.h>

#include <atomic>

// A CPU-only PyTorch has no such symbol, and the library loads there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** stream);

namespace flash_cute {
namespace {

void check_cuda(cudaError_t error, char const* action) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("flash_cute: CUDA could not ") + action + ": " + cudaGetErrorName(error) +
                           " (" + cudaGetErrorString(error) + ")");
}

// Makes a device current for PyTorch and for this library, whose CUDA runtime is linked statically and
// is not PyTorch's. PyTorch's guard restores: it knows how not to create a context on the way.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device_index) : guard_(device_index) {
    int current = -1;
    check_cuda(cudaGetDevice(&current), "read the current device");
    if (current != device_index) check_cuda(cudaSetDevice(device_index), "set the current device");
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

cudaStream_t current_stream(int device_index) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    throw std::runtime_error("flash_cute: this PyTorch is built without CUDA and has no stream to launch on");
  }
  void* stream = nullptr;
  check_shim(aoti_torch_get_current_cuda_stream(device_index, &stream), "name the current stream");
  return static_cast<cudaStream_t>(stream);
}

// Inside a kernel nothing is recorded for autograd; PyTorch does not see to it when an operator has no
// autograd of its own.
class NoGrad {
 public:
  NoGrad() : was_enabled_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(was_enabled_); }
  NoGrad(NoGrad const&) = delete;

 private:
  bool was_enabled_;
};

using Sizes = std::array<int64_t, 4>;

void copy_into(AtenTensorHandle destination, AtenTensorHandle source) {
  NoGrad no_grad;
  check_shim(aoti_torch_copy_(destination, source, /*non_blocking=*/1), "copy a tensor");
}

// Columns [first, first + width) of a contiguous tensor.
Tensor columns(Tensor const& tensor, Sizes sizes, int64_t first, int64_t width) {
  Sizes const strides = contiguous_strides(sizes);
  sizes[3] = width;
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch__reinterpret_tensor(tensor.get(), 4, sizes.data(), strides.data(), first, &handle),
             "take a view of a tensor");
  return Tensor(handle);
}

Tensor empty_padded(TensorInfo const& like, Sizes& sizes, int padded_head_dim) {
  sizes = {like.sizes[0], like.sizes[1], like.sizes[2], padded_head_dim};
  return empty_strided(sizes, contiguous_strides(sizes), like.dtype, like);
}

// A contiguous copy whose columns beyond the tensor's own are zero: they add nothing to a score.
Tensor padded_copy(TensorInfo const& tensor, int padded_head_dim) {
  Sizes sizes{};
  Tensor copy = empty_padded(tensor, sizes, padded_head_dim);
  int64_t const head_dim = tensor.sizes[3];
  copy_into(columns(copy, sizes, 0, head_dim).get(), tensor.handle);
  if (head_dim < padded_head_dim) {
    check_shim(aoti_torch_zero_(columns(copy, sizes, head_dim, padded_head_dim - head_dim).get()), "zero a tensor");
  }
  return copy;
}

// The stride of a dim of size 1 is never walked, and may be anything: 0 keeps it out of the kernel's way.
Strides kernel_strides(int64_t const* sizes, int64_t const* strides) {
  auto stride = [&](int dim) { return sizes[dim] > 1 ? strides[dim] : 0; };
  return {.batch = stride(0), .head = stride(1), .row = stride(2)};
}

struct Operand {
  Tensor copy;  // null when the tensor itself is read
  void const* data = nullptr;
  Strides strides = {};
};

Operand operand(TensorInfo const& tensor, Copy reason, int padded_head_dim) {
  Operand result;
  TensorInfo source = tensor;
  if (reason != Copy::kNone) {
    result.copy = padded_copy(tensor, padded_head_dim);
    source = tensor_info(tensor.name, result.copy.get());
  }
  result.data = data_pointer(source.handle);
  result.strides = kernel_strides(source.sizes, source.strides);
  return result;
}

FwdResult allocate(TensorInfo const& q) {
  Sizes const sizes{q.sizes[0], q.sizes[1], q.sizes[2], q.sizes[3]};
  std::array<int64_t, 3> const lse_sizes{q.sizes[0], q.sizes[1], q.sizes[2]};
  return {.out = empty_strided(sizes, empty_like_strides(q), q.dtype, q),
          .lse = empty_strided(lse_sizes, contiguous_strides(lse_sizes), aoti_torch_dtype_float32(), q)};
}

void launch_fwd(FwdArgs const& args, FwdProblem const& problem, FwdDecision const& decision, FwdResult const& result) {
  Operand const q = operand(args.q, decision.q, decision.padded_head_dim);
  Operand const k = operand(args.k, decision.k, decision.padded_head_dim);
  Operand const v = operand(args.v, decision.v, decision.padded_head_dim);

  Sizes padded_sizes{};
  Tensor padded_out;
  if (decision.out != Copy::kNone) padded_out = empty_padded(args.q, padded_sizes, decision.padded_head_dim);
  TensorInfo const out = tensor_info("out", padded_out ? padded_out.get() : result.out.get());

  FwdParams const params{.q = q.data,
                         .k = k.data,
                         .v = v.data,
                         .out = mutable_data_pointer(out.handle),
                         .lse = static_cast<float*>(mutable_data_pointer(result.lse.get())),
                         .q_strides = q.strides,
                         .k_strides = k.strides,
                         .v_strides = v.strides,
                         .out_strides = kernel_strides(out.sizes, out.strides),
                         .batch = problem.batch,
                         .heads_q = problem.heads_q,
                         .heads_kv = problem.heads_kv,
                         .len_q = problem.len_q,
                         .len_k = problem.len_k,
                         .head_dim = decision.padded_head_dim,
                         .diagonal = problem.causal == Causal::kBottomRight ? problem.len_k - problem.len_q : 0,
                         .scale = static_cast<float>(problem.scale),
                         .scale_log2 = static_cast<float>(problem.scale * 1.4426950408889634)};
  check_cuda(decision.instance.launch(decision.plan, params, current_stream(args.q.device_index)),
             "launch the forward");
  if (padded_out) copy_into(result.out.get(), columns(padded_out, padded_sizes, 0, problem.head_dim).get());
}

}  // namespace

// Asked of the driver once a device. Threads that ask at once store the same answer.
Gpu device_gpu(int device_index) {
  constexpr int kCached = 64;
  static std::array<std::atomic<int64_t>, kCached> cache{};  // 0, or the two figures packed
  bool const cached = device_index >= 0 && device_index < kCached;
  if (cached) {
    int64_t const packed = cache[device_index].load(std::memory_order_relaxed);
    if (packed != 0) return {.capability = static_cast<int>(packed >> 32), .num_sms = static_cast<int>(packed)};
  }
  auto ask = [&](cudaDeviceAttr attribute) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, attribute, device_index), "describe the device");
    return value;
  };
  Gpu const gpu{.capability = 10 * ask(cudaDevAttrComputeCapabilityMajor) + ask(cudaDevAttrComputeCapabilityMinor),
                .num_sms = ask(cudaDevAttrMultiProcessorCount)};
  if (cached) cache[device_index].store(int64_t{gpu.capability} << 32 | gpu.num_sms, std::memory_order_relaxed);
  return gpu;
}

FwdResult fwd_cuda(FwdArgs const& args) {
  FwdProblem const problem = check_fwd(args, /*on_cuda=*/true);
  FLASH_CUTE_CHECK(is_cuda(args.q), "q: expected a CUDA tensor, got ", device_name(args.q));
  FwdDecision const decision = plan_fwd(args, problem, device_gpu(args.q.device_index));

  CurrentDevice const device(args.q.device_index);
  FwdResult result = allocate(args.q);
  if (num_tiles(problem, decision.shape) > 0) launch_fwd(args, problem, decision, result);
  return result;
}

}  // namespace flash_cute

#endif  // FLASH_CUTE_NO_CUDA
