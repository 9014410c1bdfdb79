// Runs kernels on the host, whose threads run one after the other: includes CuTe, and stands before what includes it.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <vector>

#include <cute/config.hpp>

#undef __global__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

// A CTA's threads: a fiber each, which goes on with the next one where it waits for others.
namespace host {

struct Index {
  unsigned x = 0;
};

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(32 << 10);
  bool done = false;
};

// What the lanes of a warp have brought to the collective that they are in.
struct Warp {
  unsigned values[32];
  int arrived = 0;
  int left = 32;
};

std::vector<Thread> threads;
std::vector<Warp> warps;
ucontext_t scheduler;
int current, at_barrier, barriers;
std::function<void()> kernel;

void wait_for(std::function<bool()> const& ready) {
  while (!ready()) {
    int const self = current;
    swapcontext(&threads[self].context, &scheduler);
  }
}

void run_thread() {
  kernel();
  threads[current].done = true;
  swapcontext(&threads[current].context, &scheduler);
}

}  // namespace host

inline host::Index threadIdx, blockIdx;

namespace host {

void run_cta(int index, int number, std::function<void()> const& body) {
  kernel = body;
  blockIdx.x = index;
  threads.resize(number);
  warps.assign(number / 32, {});
  at_barrier = barriers = 0;
  for (Thread& thread : threads) {
    thread.done = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, run_thread, 0);
  }
  for (bool left = true; left;) {
    left = false;
    for (int i = 0; i < number; ++i) {
      if (threads[i].done) continue;
      left = true;
      threadIdx.x = current = i;
      swapcontext(&scheduler, &threads[i].context);
    }
  }
}

// The values of all lanes, reduced.
template <class Op>
unsigned collect(unsigned value, Op const& op) {
  Warp& warp = warps[threadIdx.x / 32];
  wait_for([&] { return warp.left == 32; });  // all have left the collective before
  warp.values[threadIdx.x % 32] = value;
  if (++warp.arrived == 32) warp.left = 0;
  wait_for([&] { return warp.arrived == 32; });
  unsigned const result = op(warp.values);
  if (++warp.left == 32) warp.arrived = 0;
  return result;
}

template <class T, class Op>
T reduce(T value, Op const& op) {
  return static_cast<T>(collect(static_cast<unsigned>(value), [&](unsigned const* values) {
    T result = static_cast<T>(values[0]);
    for (int i = 1; i < 32; ++i) result = op(result, static_cast<T>(values[i]));
    return static_cast<unsigned>(result);
  }));
}

}  // namespace host

inline int __reduce_min_sync(unsigned, int x) { return host::reduce(x, [](int a, int b) { return std::min(a, b); }); }
inline int __reduce_max_sync(unsigned, int x) { return host::reduce(x, [](int a, int b) { return std::max(a, b); }); }
inline int __reduce_add_sync(unsigned, int x) { return host::reduce(x, [](int a, int b) { return a + b; }); }
inline unsigned __reduce_or_sync(unsigned, unsigned x) { return host::reduce(x, std::bit_or<unsigned>()); }
inline unsigned __reduce_and_sync(unsigned, unsigned x) { return host::reduce(x, std::bit_and<unsigned>()); }
inline unsigned __ballot_sync(unsigned, int x) {
  return host::collect(x != 0, [](unsigned const* values) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= values[i] << i;
    return bits;
  });
}
inline unsigned __shfl_xor_sync(unsigned, unsigned x, int other) {
  int const from = int(threadIdx.x % 32) ^ other;
  return host::collect(x, [&](unsigned const* values) { return values[from]; });
}
inline void __syncwarp() { host::collect(0, [](unsigned const*) { return 0u; }); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selectors) {
  uint64_t const bytes = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> 8 * (selectors >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline void __syncthreads() {
  int const own = host::barriers;
  if (++host::at_barrier == int(host::threads.size())) {
    host::at_barrier = 0;
    ++host::barriers;
  }
  host::wait_for([&] { return host::barriers != own; });
}

namespace host {

// Bytes behind which nothing can be read.
class GuardedBytes {
 public:
  GuardedBytes() = default;
  GuardedBytes(GuardedBytes const&) = delete;
  ~GuardedBytes() {
    if (pages_ != nullptr) munmap(pages_, size_);
  }

  // `padding`: bytes between the last one and the guard.
  uint8_t* allocate(int64_t bytes, int padding) {
    int64_t const page = sysconf(_SC_PAGESIZE), used = (bytes + padding + page - 1) / page * page;
    size_ = used + page;
    pages_ = static_cast<uint8_t*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(pages_ + used, page, PROT_NONE);
    return pages_ + used - padding - bytes;
  }

 private:
  uint8_t* pages_ = nullptr;
  size_t size_ = 0;
};

}  // namespace host
