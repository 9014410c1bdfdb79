// Fibers, the scheduler, and what threads do together.
#include "machine.h"

#include <sys/mman.h>

#include <map>
#include <stdexcept>

namespace emu {

Machine machine;

namespace {

constexpr char kTooManyArrivals[] = "more arrivals at an mbarrier than its phase has";
constexpr size_t kStackBytes = 512 << 10;
std::vector<char*> stacks;  // kept for the next launch
std::function<void()> const* kernel;
ucontext_t before_first;

struct Rates {
  double copies, products;
  int left;  // picks until they change
} rates;

void begin() {
  (*kernel)();
  machine.lane->wait = Wait::kEnd;
  switch_out();
}

bool products_done(Warp const& warp, Lane const& lane) {
  return warp.products.empty() || warp.products.front().group >= warp.committed - lane.groups;
}

bool stores_done(Lane const& lane) {
  for (Copy const& copy : machine.copies) {
    if (copy.lane != &lane || copy.group >= lane.committed - lane.groups) continue;
    if (!lane.reads || copy.read != nullptr) return false;
  }
  return true;
}

bool can_run(Warp const& warp, Lane const& lane) {
  switch (lane.wait) {
    case Wait::kNothing: return true;
    case Wait::kTogether: return warp.generation != lane.generation;
    case Wait::kMBarrier: return (lane.mbarrier->phase & 1) != lane.parity;
    case Wait::kNamed: return lane.named->generation != lane.generation;
    case Wait::kProducts: return products_done(warp, lane);
    case Wait::kStores: return stores_done(lane);
    case Wait::kEnd: return false;
  }
  return false;
}

bool can_run(Warp const& warp) {
  for (Lane const& lane : warp.lanes) {
    if (can_run(warp, lane)) return true;
  }
  return false;
}

void resume(Cta& cta, Warp& warp, int warp_index, int index) {
  Lane& lane = warp.lanes[index];
  lane.wait = Wait::kNothing;
  machine.cta = &cta;
  machine.warp = &warp;
  machine.lane = &lane;
  threadIdx = {unsigned(32 * warp_index + index), 0, 0};
  blockIdx = {cta.index, 0, 0};
  if (_setjmp(machine.scheduler) == 0) {
    if (lane.begun) _longjmp(lane.context, 1);
    lane.begun = true;
    swapcontext(&before_first, &lane.first);
  }
  if (!machine.failure.empty()) throw std::runtime_error(machine.failure);
}

// Runs a copy or a product that is under way. Returns whether there was one.
bool happen(bool copies, bool products) {
  std::vector<std::pair<Cta*, Warp*>> with_products;
  if (products) {
    for (Cta& cta : machine.ctas) {
      for (Warp& warp : cta.warps) {
        if (!warp.products.empty()) with_products.emplace_back(&cta, &warp);
      }
    }
  }
  size_t const number = with_products.size() + (copies ? machine.copies.size() : 0);
  if (number == 0) return false;
  size_t const which = random_below(number);
  if (which < with_products.size()) {
    run_product(*with_products[which].first, *with_products[which].second);
    return true;
  }
  size_t const index = which - with_products.size();
  if (machine.copies[index].read != nullptr) {
    std::exchange(machine.copies[index].read, nullptr)();
    return true;
  }
  Copy copy = std::move(machine.copies[index]);
  machine.copies.erase(machine.copies.begin() + long(index));
  copy.copy();
  if (copy.barrier != nullptr) {
    copy.barrier->bytes -= copy.bytes;
    if (copy.arrives && copy.barrier->pending-- == 0) throw std::runtime_error(kTooManyArrivals);
    complete(*copy.barrier);
  }
  return true;
}

void draw_rates() {
  static constexpr double kRates[] = {0, 0.01, 0.1, 0.5, 0.9};
  rates = {kRates[random_below(5)], kRates[random_below(5)], int(50 + random_below(1000))};
  for (Cta& cta : machine.ctas) {
    double const of_cta = std::exp2(-double(random_below(4)));
    for (Warp& warp : cta.warps) warp.weight = of_cta * std::exp2(-double(random_below(9)));
  }
}

[[noreturn]] void deadlock(char const* what) {
  std::string text = what;
  for (Cta const& cta : machine.ctas) {
    std::map<std::string, std::string> who;
    for (size_t w = 0; w < cta.warps.size(); ++w) {
      std::map<std::string, int> lanes;
      for (Lane const& lane : cta.warps[w].lanes) ++lanes[describe(cta, lane)];
      for (auto const& [why, count] : lanes) {
        who[why] += " " + std::to_string(w) + (count == 32 ? "" : "(" + std::to_string(count) + " lanes)");
      }
    }
    for (auto const& [why, warps] : who) {
      text += "\n  CTA " + std::to_string(cta.index) + ", warps" + warps + ": " + why;
    }
  }
  throw std::runtime_error(text);
}

struct Runnable {
  Cta* cta;
  Warp* warp;
  int index;
};

void schedule() {
  std::vector<Runnable> runnable;
  for (int64_t idle = 0;;) {
    if (--rates.left < 0) draw_rates();
    if (chance(rates.copies) && happen(true, false)) idle = 0;
    if (chance(rates.products) && happen(false, true)) idle = 0;
    runnable.clear();
    double weights = 0;
    bool all_ended = true, all_spin = true;
    for (Cta& cta : machine.ctas) {
      for (size_t w = 0; w < cta.warps.size(); ++w) {
        Warp& warp = cta.warps[w];
        for (Lane const& lane : warp.lanes) all_ended &= lane.wait == Wait::kEnd;
        if (!can_run(warp)) continue;
        runnable.push_back({&cta, &warp, int(w)});
        weights += warp.weight;
        for (Lane const& lane : warp.lanes) all_spin &= lane.spins || !can_run(warp, lane);
      }
    }
    if (all_ended) break;
    if (!all_spin) idle = 0;
    if (runnable.empty() || (all_spin && chance(0.1))) {
      if (!happen(true, true)) {
        if (runnable.empty()) deadlock("deadlock");
        if (++idle > 100'000) deadlock("threads wait for a word of memory that nobody writes");
      }
      if (runnable.empty()) continue;
    }
    double left = weights * (double(machine.random() >> 11) * 0x1p-53);
    size_t picked = 0;
    while (picked + 1 < runnable.size() && (left -= runnable[picked].warp->weight) > 0) ++picked;
    auto const [cta, warp, index] = runnable[picked];
    machine.pauses = chance(0.5);
    int const first = int(random_below(32));
    uint32_t lanes = 0;  // those that can run now: one that another one wakes stays behind with the rest of its warp
    for (int lane = 0; lane < 32; ++lane) lanes |= uint32_t{can_run(*warp, warp->lanes[lane])} << lane;
    for (int i = 0; i < 32; ++i) {
      int const lane = (first + i) % 32;
      if (lanes >> lane & 1) resume(*cta, *warp, index, lane);
    }
  }
  while (happen(true, true)) {
  }
}

}  // namespace

void seed(uint64_t number) { machine.random.seed(number); }

void switch_out() {
  if (_setjmp(machine.lane->context) == 0) _longjmp(machine.scheduler, 1);
}

void wait_for(Wait wait) {
  machine.lane->wait = wait;
  if (can_run(*machine.warp, *machine.lane)) {
    machine.lane->wait = Wait::kNothing;
    return;
  }
  switch_out();
}

void fail(char const* what) {
  machine.failure = std::string(what) + " (CTA " + std::to_string(blockIdx.x) + ", thread " +
                    std::to_string(threadIdx.x) + ")";
  switch_out();
  std::abort();
}

void pause() {
  if (machine.diverges ? chance(0.5) : machine.pauses) switch_out();
}

void spin() {
  machine.lane->spins = true;
  switch_out();
  machine.lane->spins = false;
}

uint64_t const* together(Together what, unsigned mask, uint64_t value) {
  Warp& warp = *machine.warp;
  if (mask != ~0u) fail("a part of a warp does something together: not emulated");
  if (warp.arrived == 0) warp.what = what;
  if (warp.what != what) fail("the lanes of a warp do different things together");
  unsigned const generation = warp.generation;
  warp.values[generation & 1][threadIdx.x % 32] = value;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.generation;
    switch_out();  // the others go on with this lane
  } else {
    machine.lane->generation = generation;
    wait_for(Wait::kTogether);
  }
  return warp.values[generation & 1];
}

namespace {
NamedBarrier& arrive_named(int id, int threads, bool value) {
  NamedBarrier& named = machine.cta->named[id];
  if (named.threads == 0) named.threads = threads;
  if (named.threads != threads) fail("a named barrier of two numbers of threads");
  named.any |= value;
  if (++named.arrived == threads) {
    named.any_before = named.any;
    named.any = false;
    named.threads = named.arrived = 0;
    ++named.generation;
  }
  return named;
}

void wait_for_named() {
  if (machine.lane->named->generation != machine.lane->generation) {
    switch_out();  // the others go on with this lane
  } else {
    wait_for(Wait::kNamed);
  }
}
}  // namespace

void barrier(int id, int threads, bool waits) {
  machine.lane->generation = machine.cta->named[id].generation;
  machine.lane->named = &machine.cta->named[id];
  machine.lane->id = id;
  arrive_named(id, threads, false);
  if (waits) wait_for_named();
}

bool barrier_or(int id, int threads, bool value) {
  machine.lane->generation = machine.cta->named[id].generation;
  machine.lane->named = &machine.cta->named[id];
  machine.lane->id = id;
  NamedBarrier const& named = arrive_named(id, threads, value);
  wait_for_named();
  return named.any_before;
}

void* shared_variable(int number, size_t bytes) {
  std::unique_ptr<char[]>& variable = machine.cta->variables[number];
  if (variable == nullptr) variable = std::make_unique<char[]>(bytes);
  return variable.get();
}

char* shared_memory() { return machine.cta->shared; }

uint32_t shared_address(void const* pointer) {
  int64_t const offset = static_cast<char const*>(pointer) - machine.cta->shared;
  if (offset < 0 || offset > int64_t(machine.shared_bytes)) fail("an address that is not in shared memory");
  return kFirstAddress + uint32_t(offset);
}

char* at_address(Cta& cta, uint32_t address, int64_t bytes) {
  int64_t const offset = int64_t{address} - kFirstAddress;
  if (offset < 0 || offset + bytes > int64_t(machine.shared_bytes)) fail("an access outside of shared memory");
  return cta.shared + offset;
}

void mbarrier_init(uint32_t address, int arrivals) {
  machine.cta->mbarriers[address] = {.arrivals = arrivals, .pending = arrivals};
}

MBarrier& mbarrier_at(uint32_t address) {
  auto const found = machine.cta->mbarriers.find(address);
  if (found == machine.cta->mbarriers.end()) fail("an mbarrier that was not initialised");
  return found->second;
}

void complete(MBarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.arrivals;
}

void mbarrier_arrive(uint32_t address) {
  MBarrier& barrier = mbarrier_at(address);
  if (barrier.pending == 0) fail(kTooManyArrivals);
  --barrier.pending;
  complete(barrier);
}

void mbarrier_expect(uint32_t address, uint32_t bytes) {
  mbarrier_at(address).bytes += bytes;
  mbarrier_arrive(address);
}

void mbarrier_wait(uint32_t address, int parity) {
  machine.lane->mbarrier = &mbarrier_at(address);
  machine.lane->parity = unsigned(parity);
  machine.lane->address = address;
  wait_for(Wait::kMBarrier);
}

std::string describe(Cta const& cta, Lane const& lane) {
  switch (lane.wait) {
    case Wait::kNothing: return lane.spins ? "reads a word again and again" : "runs";
    case Wait::kTogether: return "waits for the other lanes of its warp";
    case Wait::kMBarrier:
      return "waits at the mbarrier at byte " + std::to_string(lane.address - kFirstAddress) +
             " of shared memory for the end of parity " + std::to_string(lane.parity) + "; it is in phase " +
             std::to_string(lane.mbarrier->phase) + ", lacks " + std::to_string(lane.mbarrier->pending) + " of " +
             std::to_string(lane.mbarrier->arrivals) + " arrivals and " + std::to_string(lane.mbarrier->bytes) +
             " bytes";
    case Wait::kNamed:
      return "waits at barrier " + std::to_string(lane.id) + ", where " + std::to_string(cta.named[lane.id].arrived) +
             " of " + std::to_string(cta.named[lane.id].threads) + " threads are";
    case Wait::kProducts: return "waits for products";
    case Wait::kStores: return "waits for its bulk stores";
    case Wait::kEnd: return "has ended";
  }
  return "";
}

void Grid::run(std::function<void()> const& body) const {
  kernel = &body;
  gridDim = grid;
  blockDim = block;
  machine.failure.clear();
  machine.copies.clear();
  machine.ctas = std::vector<Cta>(grid.x);
  machine.shared_bytes = shared_bytes;
  size_t threads = 0;
  for (Cta& cta : machine.ctas) {
    cta.index = unsigned(&cta - machine.ctas.data());
    cta.storage = std::make_unique<char[]>(shared_bytes + 1024);
    cta.shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(cta.storage.get()) + 1023) / 1024 * 1024);
    std::memset(cta.shared, 0xff, shared_bytes);  // NaN
    cta.warps = std::vector<Warp>(block.x / 32);
    for (Warp& warp : cta.warps) {
      for (Lane& lane : warp.lanes) {
        if (threads == stacks.size()) {
          void* const stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
          if (stack == MAP_FAILED) throw std::runtime_error("no memory for a thread's stack");
          stacks.push_back(static_cast<char*>(stack));
        }
        getcontext(&lane.first);
        lane.first.uc_stack.ss_sp = stacks[threads++];
        lane.first.uc_stack.ss_size = kStackBytes;
        lane.first.uc_link = nullptr;
        makecontext(&lane.first, begin, 0);
      }
    }
  }
  rates.left = 0;
  schedule();
}

}  // namespace emu
