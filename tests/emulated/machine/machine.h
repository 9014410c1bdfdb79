// The emulated machine: threads, and what is under way.
//
// A thread of a CTA is a fiber, which runs until it waits. The scheduler then picks a warp at random, and runs those of
// its lanes that need not wait; all CTAs of a launch are there at once. What is asynchronous on the GPU, a TMA copy or
// a warp's part of a WGMMA, is under way from its issue on, and happens at a random moment before the wait for it ends.
// Until then its result's place holds NaN: the destination of a TMA load from its issue on, since the hardware may
// write it at once; accumulators from the issue until wgmma.wait_group. So a missing wait, or a stage that is released
// too early, gives NaN or wrong results for some of the seeds, and a missing arrival a deadlock. How probable copies,
// products and each warp are changes from time to time: now one, now another is far behind.
#pragma once

#include <csetjmp>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include <ucontext.h>

#include "device.h"

namespace emu {

struct MBarrier {
  int arrivals = 0;  // of a phase
  int pending = 0;   // those that are missing
  int64_t bytes = 0;  // that are expected and have not been written
  unsigned phase = 0;
};

struct NamedBarrier {
  int threads = 0;  // 0: nobody is at it
  int arrived = 0;
  unsigned generation = 0;
  bool any = false;
  bool any_before = false;  // of the generation before
};

enum class Wait : char { kNothing, kTogether, kMBarrier, kNamed, kProducts, kStores, kEnd };

struct Lane {
  std::jmp_buf context;
  ucontext_t first;  // until it has begun
  bool begun = false;
  Wait wait = Wait::kNothing;
  MBarrier* mbarrier = nullptr;
  unsigned parity = 0;
  NamedBarrier* named = nullptr;
  unsigned generation = 0;  // of the named barrier, or of what the warp does together
  int groups = 0;           // that may be under way
  int committed = 0;        // groups of stores
  bool reads = false;       // the stores' reads are what it waits for
  bool spins = false;
  std::vector<std::function<void()>> copies;  // cp.async that nothing waits for yet
  uint32_t address = 0;                       // what it waits at
  int id = 0;
};

// The accumulator of products under way.
struct Accumulator {
  float* registers[32];  // of each lane
  int n;
  int under_way = 0;
  int group = 0;  // of the last product
  std::vector<float> values;  // (16, n)
};

struct WarpProduct {
  Product product;
  uint32_t const* a[32][4];
  std::shared_ptr<Accumulator> accumulator;
  int group;
};

struct Warp {
  Lane lanes[32];
  double weight = 1;
  // What the lanes do together.
  uint64_t values[2][32];
  Together what;
  int arrived = 0;
  unsigned generation = 0;
  // Products.
  std::deque<WarpProduct> products;
  std::vector<std::shared_ptr<Accumulator>> accumulators;
  int committed = 0;  // groups
};

struct Cta {
  unsigned index;
  std::unique_ptr<char[]> storage;
  char* shared;  // aligned
  std::unordered_map<uint32_t, MBarrier> mbarriers;
  std::unordered_map<int, std::unique_ptr<char[]>> variables;  // shared ones that the kernel declares
  NamedBarrier named[16];
  std::vector<Warp> warps;
};

constexpr uint32_t kFirstAddress = 1024;  // of a CTA's shared memory

// A TMA copy, or those of a lane by cp.async. A load arrives at a barrier; a store reads shared memory some time before
// it writes.
struct Copy {
  Cta* cta;
  std::function<void()> copy;
  MBarrier* barrier = nullptr;
  int64_t bytes = 0;
  bool arrives = false;  // its issue was no arrival
  Lane* lane = nullptr;  // of a store
  int group = 0;
  std::function<void()> read = nullptr;  // of a store that has not read yet
};

struct Machine {
  std::mt19937_64 random;
  std::vector<Cta> ctas;
  std::vector<Copy> copies;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  Lane* lane = nullptr;
  std::jmp_buf scheduler;
  std::string failure;
  bool diverges = false;  // the lanes of a warp run apart where nothing keeps them together
  bool pauses = false;    // the warp that runs does at the next pause()
  size_t shared_bytes = 0;
};
extern Machine machine;

void seed(uint64_t number);
void switch_out();                     // of the lane, to the scheduler
void wait_for(Wait wait);              // the lane's fields say for what
void complete(MBarrier& barrier);      // its phase, where nothing is missing
MBarrier& mbarrier_at(uint32_t address);
void run_product(Cta& cta, Warp& warp);  // the first one under way
char* at_address(Cta& cta, uint32_t address, int64_t bytes);
std::string describe(Cta const& cta, Lane const& lane);
inline uint64_t random_below(uint64_t n) { return machine.random() % n; }
inline bool chance(double probability) { return double(machine.random() >> 11) * 0x1p-53 < probability; }

}  // namespace emu
