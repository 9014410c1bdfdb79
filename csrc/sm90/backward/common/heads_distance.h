// How far apart a head's key tiles are in the order of tasks. Plain constants.
#pragma once

namespace flash_cute::sm90::backward {

// The distance in the order of tasks between consecutive key tiles of a head, in row tiles of one query head. A larger
// one: the next key tile's ordered adds never wait, and the many tiles of the last group even out. A smaller one: Q, dO
// and dQ of the group's heads stay in L2, and fewer tasks in the tail have only dQ. Measured with 40 to 2,400.
constexpr int heads_distance(bool masked, bool deterministic, int n_blocks) {
  bool const few_tiles = n_blocks < 16;
  if (deterministic) return !masked ? 240 : few_tiles ? 400 : n_blocks < 64 ? 800 : 1200;
  return (masked ? 400 : 240) / (few_tiles ? 2 : 1);
}

}  // namespace flash_cute::sm90::backward
