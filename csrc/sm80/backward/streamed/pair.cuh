// Two CTAs that share a tile of a gradient, see sm80/streaming/pair.cuh: each computes W of every second tile of the
// other side, and sends it to the other one. Both multiply the same 16 bits: the gradients do not depend on timing.
//
// A pair draws units of work from a counter until there are none, of each gradient of a kernel: its first CTA draws,
// and sends the unit's number. While a CTA waits for a partner that has not started it holds one unit, and the other
// pairs compute the rest.
#pragma once

#include "core/registers.cuh"
#include "sm80/streaming/pair.cuh"
#include "pair.h"

namespace flash_cute::sm80::backward::streamed {

using namespace cute;

using Pair = streaming::Pair<Message>;

// A CTA without a partner.
struct Alone {
  CUTE_DEVICE static int thread() { return threadIdx.x; }
};

// What a CTA of a pair knows of it, in shared memory. One thread writes it between tasks.
struct PairState {
  int ticket;
  bool done;     // there are no more units of the gradient
  int sent;      // messages, before the task's first W
  int messages;  // of the task, by each CTA; 0: the CTAs have different tiles, and exchange nothing
  int part;      // the CTA's first tile of the other side is the task's first or second one
  int tiles;     // of the other side, of all query heads
};

// A CTA's side of a task's exchange. `turn`: see Turns.
class Exchange {
 public:
  CUTE_DEVICE Exchange(PairMemory const& memory, PairState const& state) : memory_(memory), state_(state) {}

  CUTE_DEVICE Pair at_turn(int turn) const {
    return {memory_.messages, memory_.flags, state_.ticket, state_.sent + (turn + 1) / 2};
  }
  CUTE_DEVICE bool exists() const { return state_.messages > 0; }
  CUTE_DEVICE static int thread() { return fresh_thread_index(); }  // else the loop over tasks keeps what it gives

 private:
  PairMemory const& memory_;
  PairState const& state_;
};

// By one thread of each CTA: the pair's next unit of the counter, the same for both.
CUTE_DEVICE int draw_unit(PairMemory const& memory, int* counter, PairState& state) {
  Pair pair(memory.messages, memory.flags, state.ticket, state.sent);
  int unit = 0;
  if (pair.part() == 0) pair.own().unit = unit = atomicAdd(counter, 1);
  pair.send();
  pair.wait();
  ++state.sent;
  return pair.part() == 0 ? unit : __ldcg(&pair.other().unit);
}

enum class Found { kNothing, kOwnTile, kSharedTile };

// Takes the pair's next unit of a counter. find_task(unit, part), by one thread, finds the CTA's task in it, of a tile
// that its partner has too, or not; kNothing: there is no such unit. Returns whether there was one. Has barriers.
template <class Storage, class FindTask>
CUTE_DEVICE bool take_unit(PairMemory const& memory, int* counter, Storage& smem, FindTask const& find_task) {
  __syncthreads();  // no thread reads the task before any more, or what it was sent
  if (fresh_thread_index() == 0) {  // fresh: else the thread's index is kept in a register
    PairState& state = smem.pair;
    state.sent += state.messages;
    int const unit = draw_unit(memory, counter, state), part = state.ticket % 2;
    Found const found = find_task(unit, part);
    bool const shared = found == Found::kSharedTile;
    auto const& task = smem.task;
    state.done = found == Found::kNothing;
    state.tiles = task.tile < 0 ? 0 : task.heads * (task.others.end - task.others.begin);
    state.part = shared ? part : 0;
    state.messages = shared ? (state.tiles + 1) / 2 : 0;
  }
  __syncthreads();  // the task is there
  return !smem.pair.done;
}

}  // namespace flash_cute::sm80::backward::streamed
