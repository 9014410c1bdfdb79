#include "device.h"

#ifdef FLASH_CUTE_NO_CUDA

namespace flash_cute {

namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error("flash_cute: this build has no CUDA kernels (it was built with FLASH_CUTE_NO_CUDA)");
}

}  // namespace

Gpu device_gpu(int) { refuse(); }
std::string const& device_model(int) { refuse(); }
bool some_device_is(std::string_view) { refuse(); }

}  // namespace flash_cute

#else

#include <atomic>
#include <vector>

// Weak: a CPU-only PyTorch does not have this symbol, and the library must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** stream);

namespace flash_cute {

// Queried once per device and cached. Threads that race store the same value.
Gpu device_gpu(int device_index) {
  constexpr int kCached = 64;
  static std::array<std::atomic<int64_t>, kCached> cache{};  // 0: not yet known; else capability << 32 | num_sms
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

namespace {

// Queried once; it creates no context.
std::vector<std::string> const& device_models() {
  static std::vector<std::string> const models = [] {
    int count = 0;
    check_cuda(cudaGetDeviceCount(&count), "count the devices");
    std::vector<std::string> names(count);
    for (int device = 0; device < count; ++device) {
      cudaDeviceProp properties{};
      check_cuda(cudaGetDeviceProperties(&properties, device), "name a device");
      names[device] = properties.name;
    }
    return names;
  }();
  return models;
}

}  // namespace

std::string const& device_model(int device_index) { return device_models().at(device_index); }

bool some_device_is(std::string_view model) {
  std::vector<std::string> const& models = device_models();
  return std::find(models.begin(), models.end(), model) != models.end();
}

// A launch's error is also kept for cudaGetLastError, where the next launch would find it: it is taken from there. (No
// other library's errors are: this one has a CUDA runtime of its own.)
void check_cuda(cudaError_t error, char const* action) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string("flash_cute: CUDA could not ") + action + ": " + cudaGetErrorName(error) +
                           " (" + cudaGetErrorString(error) + ")");
}

namespace {

// Functions of the driver, looked up through the runtime so that nothing links to libcuda.
class ContextFunctions {
 public:
  // Throws, at the first call, where there is no driver.
  static ContextFunctions const& instance() {
    static ContextFunctions const functions;
    return functions;
  }

  // Null where this thread has none.
  CUcontext current() const {
    CUcontext context = nullptr;
    return get_(&context) == CUDA_SUCCESS ? context : nullptr;
  }

  void make_current(CUcontext context) const { set_(context); }

 private:
  ContextFunctions() {
    find("cuCtxGetCurrent", get_);
    find("cuCtxSetCurrent", set_);
  }

  template <class Function>
  static void find(char const* name, Function& function) {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_cuda(cudaGetDriverEntryPointByVersion(name, &symbol, 12000, cudaEnableDefault, &result), "find the driver");
    check_cuda(result == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorSymbolNotFound, "find the driver");
    function = reinterpret_cast<Function>(symbol);
  }

  decltype(&cuCtxGetCurrent) get_;
  decltype(&cuCtxSetCurrent) set_;
};

}  // namespace

ContextBefore::ContextBefore() : before_(ContextFunctions::instance().current()) {}

ContextBefore::~ContextBefore() {
  ContextFunctions const& contexts = ContextFunctions::instance();
  if (before_ != nullptr && contexts.current() != before_) contexts.make_current(before_);
}

// A thread has no context before its first call of the runtime that needs one, and tensor maps, which the driver
// encodes, need it: a thread of autograd may have done nothing else before. And the runtime would launch in whatever
// context is current, while PyTorch's memory and streams belong to the primary one.
CurrentDevice::CurrentDevice(int device_index) : guard_(device_index) {
  constexpr int kKnown = 64;
  static std::array<std::atomic<CUcontext>, kKnown> primary_contexts{};
  bool const known = device_index >= 0 && device_index < kKnown;
  ContextFunctions const& contexts = ContextFunctions::instance();
  CUcontext const context = contexts.current();
  int current = -1;
  check_cuda(cudaGetDevice(&current), "read the current device");
  if (known && current == device_index && context != nullptr &&
      context == primary_contexts[device_index].load(std::memory_order_relaxed)) {
    return;
  }
  check_cuda(cudaSetDevice(device_index), "set the current device");
  if (known) primary_contexts[device_index].store(contexts.current(), std::memory_order_relaxed);
}

cudaStream_t current_stream(int device_index) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    throw std::runtime_error("flash_cute: this PyTorch is built without CUDA and has no stream to launch on");
  }
  void* stream = nullptr;
  check_shim(aoti_torch_get_current_cuda_stream(device_index, &stream), "name the current stream");
  return static_cast<cudaStream_t>(stream);
}

}  // namespace flash_cute

#endif  // FLASH_CUTE_NO_CUDA
