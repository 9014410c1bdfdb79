// What device code takes for granted, on the emulated machine: included before everything, by -include. ptx_calls.py
// turns inline PTX into calls of the functions of `emu`; machine.h says how the machine works.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>

#include <cuda.h>
#include <cuda_runtime.h>

#undef __shared__
#define __shared__ FLASH_CUTE_SHARED  // ptx_calls.py
#undef __launch_bounds__
#define __launch_bounds__(...)
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define FLASH_CUTE_RACE_TEST          // jitter() hands over to another warp
#define CUTE_ARCH_TMA_SM90_ENABLED
#define CUTE_ARCH_ELECT_ONE_SM90_ENABLED
#define CUTE_ARCH_STSM_SM90_ENABLED
#define CUTE_ARCH_MMA_SM90A_ENABLED
#define CUTE_ARCH_LDSM_SM75_ACTIVATED 1
#define CUTE_ARCH_MMA_SM80_ENABLED
#define CUTE_ARCH_CP_ASYNC_SM80_ENABLED
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1

inline uint3 threadIdx, blockIdx;
inline dim3 gridDim, blockDim;

namespace emu {

[[noreturn]] void fail(char const* what);
[[noreturn]] inline void not_emulated(char const* instruction) { fail(instruction); }

// The warp.
enum class Together : int { kShuffle, kVote, kSync, kLoadMatrix, kStoreMatrix, kProduct, kFence, kCommit, kWait };
uint64_t const* together(Together what, unsigned mask, uint64_t value);  // the lanes' values
void pause();  // lets others run, perhaps

// The CTA.
char* shared_memory();
void* shared_variable(int number, size_t bytes);
template <class T>
T& shared_variable(int number) {
  return *static_cast<T*>(shared_variable(number, sizeof(T)));
}
uint32_t shared_address(void const* pointer);
void barrier(int id, int threads, bool waits);
bool barrier_or(int id, int threads, bool value);

void mbarrier_init(uint32_t address, int arrivals);
void mbarrier_expect(uint32_t address, uint32_t bytes);
void mbarrier_arrive(uint32_t address);
void mbarrier_wait(uint32_t address, int parity);
inline void barrier_sync(int id, int threads) { barrier(id, threads, true); }
inline void barrier_arrive(int id, int threads) { barrier(id, threads, false); }
inline void barrier_any(int& any, int value, int id) { any = barrier_or(id, 128, value != 0); }
void spin();  // a read of what another CTA will change

// TMA.
void load(uint32_t destination, CUtensorMap const* map, int const* coordinates, uint32_t barrier);
void load_bytes(uint32_t destination, void const* source, uint32_t bytes, uint32_t barrier);
inline void load_tensor(uint32_t destination, uint64_t map, uint32_t barrier, int c0, int c1, int c2, int c3,
                        uint64_t /*hint*/) {
  int const coordinates[5] = {c0, c1, c2, c3, 0};
  load(destination, reinterpret_cast<CUtensorMap const*>(map), coordinates, barrier);
}
inline void load_tensor(uint32_t destination, uint64_t map, uint32_t barrier, int c0, int c1, int c2, int c3, int c4,
                        uint64_t /*hint*/) {
  int const coordinates[5] = {c0, c1, c2, c3, c4};
  load(destination, reinterpret_cast<CUtensorMap const*>(map), coordinates, barrier);
}

// Bulk stores, of a thread: groups as of WGMMA.
void store(CUtensorMap const* map, uint32_t source, int const* coordinates);
void store_bytes(void* destination, uint32_t source, uint32_t bytes);
void add_bytes(float* destination, uint32_t source, uint32_t bytes);
void commit_stores();
void wait_stores(int groups = 0);       // until they have been written
void wait_stores_read(int groups = 0);  // until shared memory has been read
inline void store_tensor(uint64_t map, uint32_t source, int c0, int c1, int c2, int c3, int c4 = 0) {
  int const coordinates[5] = {c0, c1, c2, c3, c4};
  store(reinterpret_cast<CUtensorMap const*>(map), source, coordinates);
}

// WGMMA: a warp's 16 of 64 rows. `descriptor`: of A in shared memory; or `a`, a lane's four registers of it.
struct Product {
  int n;
  bool is_bfloat16;
  uint64_t descriptor_a, descriptor_b;
  uint32_t const* a[4];  // null: shared memory
  bool adds, a_along_rows, b_along_rows;  // ..._along_rows: MN-major
  float* d;                               // n / 2 registers
};
void issue(Product const& product);
void wgmma_wait(int groups);
void wgmma_commit();
inline void wgmma_fence() { together(Together::kFence, ~0u, 0); }

template <int N, bool kBFloat16>
void wgmma_ss(float& first, float& last, uint64_t a, uint64_t b, int adds, int sign_a = 1, int sign_b = 1,
              int a_along_rows = 0, int b_along_rows = 0) {
  if (&last != &first + N / 2 - 1 || sign_a != 1 || sign_b != 1) fail("wgmma: an accumulator in pieces, or a sign");
  issue({N, kBFloat16, a, b, {}, adds != 0, a_along_rows != 0, b_along_rows != 0, &first});
}
template <int N, bool kBFloat16>
void wgmma_rs(float& first, float& last, uint32_t const& a0, uint32_t const& a1, uint32_t const& a2, uint32_t const& a3,
              uint64_t b, int adds, int sign_a = 1, int sign_b = 1, int b_along_rows = 0) {
  if (&last != &first + N / 2 - 1 || sign_a != 1 || sign_b != 1) fail("wgmma: an accumulator in pieces, or a sign");
  issue({N, kBFloat16, 0, b, {&a0, &a1, &a2, &a3}, adds != 0, false, b_along_rows != 0, &first});
}

void store_matrices(uint32_t address, uint32_t const (&words)[4]);
inline void stmatrix(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  store_matrices(address, {a, b, c, d});
}
void load_matrices(uint32_t address, uint32_t (&words)[4]);
inline void ldmatrix(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t address) {
  uint32_t words[4];
  load_matrices(address, words);
  a = words[0], b = words[1], c = words[2], d = words[3];
}

// cp.async. It is under way until the arrival at an mbarrier that waits for it; of groups until their commit, no
// longer. Behind `from_bytes` come zeros. The instruction's text has the 16 bytes that are written, or an operand.
void copy_bytes(uint32_t address, void const* from, int bytes, int from_bytes);
void arrive_with_copies(uint32_t barrier);
void finish_copies();
inline void copy_bytes(uint32_t address, uint64_t from, int from_bytes) {
  copy_bytes(address, reinterpret_cast<void const*>(from), 16, from_bytes);
}
void load_transposed(uint32_t address, uint32_t (&words)[4]);
inline void ldmatrix_transposed(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t address) {
  uint32_t words[4];
  load_transposed(address, words);
  a = words[0], b = words[1], c = words[2], d = words[3];
}
void multiply(float (&sums)[4], uint32_t const (&a)[4], uint32_t const (&b)[2], bool is_bfloat16);
template <bool kBFloat16>
void mma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
         uint32_t b1, float c0, float c1, float c2, float c3) {
  float sums[4] = {c0, c1, c2, c3};
  multiply(sums, {a0, a1, a2, a3}, {b0, b1}, kBFloat16);
  d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
}
void from_e4m3(uint32_t& halves, uint32_t pair);
inline void from_e4m3_high(uint32_t& halves, uint32_t pairs) { from_e4m3(halves, pairs >> 16); }

// Scalars.
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; }
inline void ex2(float& y, float x) { y = flushed(std::exp2(flushed(x))); }
inline void lg2(float& y, float x) { y = std::log2(flushed(x)); }
inline void rcp(float& y, float x) { y = flushed(1 / flushed(x)); }
inline void max_nan(float& x, float y) { x = std::isnan(x) ? x : std::max(x, y); }
inline void min_nan(float& x, float y) { x = std::isnan(x) ? x : std::min(x, y); }
inline void clamp_to_1e29(float& x) { x = std::isnan(x) ? x : std::clamp(x, -1e29f, 1e29f); }
inline float saturated(float x) { return std::fmin(std::fmax(x, 0.f), 1.f); }  // NaN to 0
inline void fma_sat(float& y, float a, float b, float c) { y = saturated(std::fma(a, b, c)); }
inline void mul_sat(float& y, float a, float b) { y = saturated(a * b); }
inline void neg(float& y, float x) { y = -x; }
inline void thread_index(int& x) { x = int(threadIdx.x); }
inline void block_index(int& x) { x = int(blockIdx.x); }
// The first lane, of a warp that is together.
inline void elect(unsigned& leader, unsigned& is_leader, unsigned) {
  leader = 0;
  if (threadIdx.x % 32 == 0) is_leader = 1;
}
inline void block_count(int& x) { x = int(gridDim.x); }
inline void lane_index(int& x) { x = int(threadIdx.x % 32); }
inline void clock(uint32_t& x) { x = 0; }
inline void load_acquire(int& value, int const* address) {
  spin();
  value = *static_cast<int const volatile*>(address);
}
inline void store_word(int* address, int value) { *static_cast<int volatile*>(address) = value; }
inline void increment(int* address) { ++*address; }
inline void fetch_increment(int& before, int* address) { before = (*address)++; }
inline void compare_and_swap(int& before, int* address, int expected, int value) {
  before = *address;
  if (before == expected) *address = value;
}
inline void load_four(float& a, float& b, float& c, float& d, float const* from) {
  a = from[0], b = from[1], c = from[2], d = from[3];
}
template <class... T>
void nothing(T const&...) {}
template <class... T>
void opaque(T&...) {}

// A launch: `kernel` is called by every thread. Returns when all have ended; throws where they do not.
struct Grid {
  dim3 grid, block;
  size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;

  void run(std::function<void()> const& kernel) const;

  template <class Kernel>
  auto operator->*(Kernel const& kernel) const {
    return [=, *this](auto... args) { run([&] { kernel(args...); }); };
  }
};

}  // namespace emu

// CUDA's device functions.
inline size_t __cvta_generic_to_shared(void const* pointer) { return emu::shared_address(pointer); }
inline void __syncthreads() { emu::barrier(0, int(blockDim.x), true); }
inline void __syncwarp(unsigned mask = ~0u) { emu::together(emu::Together::kSync, mask, 0); }
inline void __nanosleep(unsigned) { emu::pause(); }

namespace emu {
template <class T>
T exchanged(unsigned mask, T value, unsigned lane) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = together(Together::kShuffle, mask, bits)[lane % 32];
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
}  // namespace emu
template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emu::exchanged(mask, value, unsigned(lane));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  return emu::exchanged(mask, value, threadIdx.x % 32 ^ unsigned(distance));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  unsigned const lane = threadIdx.x % 32;
  return emu::exchanged(mask, value, lane < distance ? lane : lane - distance);
}
inline unsigned __ballot_sync(unsigned mask, int value) {
  uint64_t const* const values = emu::together(emu::Together::kVote, mask, value != 0);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(values[lane]) << lane;
  return bits;
}
inline int __any_sync(unsigned mask, int value) { return __ballot_sync(mask, value) != 0; }
inline int __all_sync(unsigned mask, int value) { return __ballot_sync(mask, value) == ~0u; }
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  uint64_t const* const values = emu::together(emu::Together::kVote, mask, value);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(values[lane]);
  return bits;
}
inline int __reduce_add_sync(unsigned mask, int value) {
  uint64_t const* const values = emu::together(emu::Together::kVote, mask, unsigned(value));
  int sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += int(unsigned(values[lane]));
  return sum;
}
inline int __reduce_max_sync(unsigned mask, int value) {
  uint64_t const* const values = emu::together(emu::Together::kVote, mask, unsigned(value));
  int largest = int(unsigned(values[0]));
  for (int lane = 1; lane < 32; ++lane) largest = std::max(largest, int(unsigned(values[lane])));
  return largest;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  uint64_t const bytes = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(unsigned(value)); }
inline int __ffs(int value) { return __builtin_ffs(value); }
template <class T>
T __ldg(T const* address) {
  return *address;
}
template <class T>
T __ldcg(T const* address) {
  return *address;
}
template <class T>
T __ldcs(T const* address) {
  return *address;
}
template <class T>
void __stcg(T* address, T const& value) {
  *address = value;
}
inline void __threadfence() {}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline float __uint_as_float(unsigned value) { return __builtin_bit_cast(float, value); }
inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
inline float __int_as_float(int value) { return __builtin_bit_cast(float, value); }
inline int __vimax3_s32(int a, int b, int c) { return std::max(a, std::max(b, c)); }
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((uint64_t{high} << 32 | low) << (shift < 32 ? shift : 32)) >> 32);
}
inline int atomicAdd(int* address, int value) {
  emu::pause();
  return std::exchange(*address, *address + value);
}
inline int atomicMax(int* address, int value) {
  emu::pause();
  return std::exchange(*address, std::max(*address, value));
}

// Not templates, which CuTe has, too.
#define FLASH_CUTE_MIN_MAX(T)                              \
  constexpr T max(T a, T b) { return a > b ? a : b; }      \
  constexpr T min(T a, T b) { return a < b ? a : b; }
FLASH_CUTE_MIN_MAX(int)
FLASH_CUTE_MIN_MAX(unsigned)
FLASH_CUTE_MIN_MAX(long)
FLASH_CUTE_MIN_MAX(float)
#undef FLASH_CUTE_MIN_MAX

namespace emu {
template <class... Expected, class... Actual>
cudaError_t launch(cudaLaunchConfig_t const* config, void (*kernel)(Expected...), Actual&&... args) {
  Grid{config->gridDim, config->blockDim, config->dynamicSmemBytes}.run([&] { kernel(args...); });
  return cudaSuccess;
}
template <class Kernel>
cudaError_t set_attribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
}  // namespace emu
#define cudaLaunchKernelEx ::emu::launch
#define cudaFuncSetAttribute ::emu::set_attribute
