// A warp on the host: its 32 lanes are coroutines that wait for each other at each warp-wide instruction.
#pragma once

#include <ucontext.h>

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>

#include "host.h"

namespace inspect {

class Warp {
 public:
  static constexpr int kLanes = 32;

  // Warp `number` of CTA `block` of `blocks`, each lane of which runs `program`.
  Warp(int number, int block, int blocks, std::function<void()> program)
      : number_(number),
        block_(block),
        blocks_(blocks),
        program_(std::move(program)),
        stacks_(new char[kLanes * kStack]) {
    for (int lane = 0; lane < kLanes; ++lane) {
      ucontext_t& context = lanes_[lane].context;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks_.get() + lane * kStack;
      context.uc_stack.ss_size = kStack;
      context.uc_link = &driver_;
      makecontext(&context, &Warp::enter, 0);
    }
  }
  Warp(Warp const&) = delete;

  // Runs until all lanes have paused, or have ended. Whether they have paused.
  bool run() {
    while (true) {
      for (Lane& lane : lanes_) {
        if (!lane.ended) resume(lane);
      }
      Lane const& first = lanes_.front();
      for (Lane const& lane : lanes_) {
        if (lane.ended != first.ended || lane.pauses != first.pauses) {
          throw std::logic_error("the lanes of a warp are at different instructions");
        }
      }
      if (first.ended || first.pauses) return !first.ended;
    }
  }

  // By every lane: waits for the others, and returns the values of all of them.
  std::array<int, kLanes> const& gather(int value) {
    // A lane may reach the next exchange before others have read this one.
    int const parity = current_->exchanges++ & 1;
    values_[parity][current_ - lanes_.data()] = value;
    leave(false);
    return values_[parity];
  }

  // By every lane: returns from run().
  void pause() { leave(true); }

  int lane() const { return int(current_ - lanes_.data()); }
  int block() const { return block_; }

  static inline Warp* running = nullptr;
  int drawn = -1;  // what its last atomicAdd returned

 private:
  static constexpr size_t kStack = 64 << 10;

  struct Lane {
    ucontext_t context;
    bool ended = false;
    bool pauses = false;
    int exchanges = 0;
  };

  static void enter() {
    running->program_();
    running->current_->ended = true;
  }

  void resume(Lane& lane) {
    running = this;
    current_ = &lane;
    threadIdx.x = number_ * kLanes + unsigned(&lane - lanes_.data());
    blockIdx.x = block_;
    gridDim.x = blocks_;
    swapcontext(&driver_, &lane.context);
  }

  void leave(bool pauses) {
    Lane& lane = *current_;
    lane.pauses = pauses;
    swapcontext(&lane.context, &driver_);
  }

  int number_, block_, blocks_;
  std::function<void()> program_;
  std::unique_ptr<char[]> stacks_;
  std::array<Lane, kLanes> lanes_;
  std::array<int, kLanes> values_[2] = {};
  ucontext_t driver_;
  Lane* current_ = nullptr;
};

}  // namespace inspect

// The instructions that csrc/ uses, of all lanes.
inline int __shfl_sync(unsigned, int value, int lane) { return inspect::Warp::running->gather(value)[lane]; }
inline int __shfl_up_sync(unsigned, int value, int distance) {
  auto const& values = inspect::Warp::running->gather(value);
  int const lane = inspect::Warp::running->lane();
  return values[lane < distance ? lane : lane - distance];
}
inline int __reduce_max_sync(unsigned, int value) {
  auto const& values = inspect::Warp::running->gather(value);
  return *std::max_element(values.begin(), values.end());
}
inline int __reduce_add_sync(unsigned, int value) {
  auto const& values = inspect::Warp::running->gather(value);
  int sum = 0;
  for (int const one : values) sum += one;
  return sum;
}
inline int atomicAdd(int* address, int value) {
  return inspect::Warp::running->drawn = std::exchange(*address, *address + value);
}
