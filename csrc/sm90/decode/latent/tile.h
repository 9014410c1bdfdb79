// The tile of Hopper's kernels of latent attention over a cache, and how its keys are cut: plain constants.
#pragma once

#include <algorithm>

#include "contract/decode.h"

namespace flash_cute::sm90::decode::latent {

constexpr int kRows = 64;      // of a row tile: those of one WGMMA
constexpr int kTileKeys = 64;
constexpr int kChunk = 64;     // columns of a TMA box: 128 bytes
constexpr int kHeadDim = 576;
constexpr int kHeadDimV = 512;
constexpr int kChunks = kHeadDim / kChunk;
constexpr int kWarpgroups = 2;  // each has half of V's columns
constexpr int kColumns = kHeadDimV / kWarpgroups;
constexpr int kColumnChunks = kColumns / kChunk;

constexpr int kConsumerWarps = 4 * kWarpgroups;
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kProducerWarps = 4;  // which all load, or one
constexpr int kThreads = kConsumers + 32 * kProducerWarps;

// Registers per thread, by setmaxnreg: of 168 on average.
constexpr int kProducerRegs = 56;
constexpr int kConsumerRegs = 224;
static_assert(kProducerRegs + kWarpgroups * kConsumerRegs <= 3 * 168);

constexpr int kStages = 2;  // key tiles in shared memory
constexpr int kChunkElements = kTileKeys * kChunk;
constexpr int kTileElements = kChunks * kChunkElements;

// Queries, key tiles, what the warpgroups tell each other of a tile, and 2 KB for the rest. All that a CTA may have.
constexpr int kMessageBytes = 2 * kRows * kTileKeys + 8 * 128;
constexpr int kSmemBytes = 2 * kRows * kHeadDim + 2 * kStages * kTileElements + kMessageBytes + 2048;
static_assert(kSmemBytes == 227 * 1024);

// The fold of a unit's pieces is in the workspace, where the accumulators of a row tile go and come at the end of a
// piece: so pieces are long, those of few rows less so. In key tiles.
struct PieceRule {
  int parts;  // of short sequences
  int least;
  int most;   // but of sequences of most_pieces such pieces
  int most_pieces;

  constexpr int tiles(int of_sequence) const {
    // Not std::clamp: on a GPU it may be a trap, by what the host compiler's library asserts in it.
    int const part = std::min(most, std::max(least, (of_sequence + parts - 1) / parts));
    return std::max(part, (of_sequence + most_pieces - 1) / most_pieces);
  }
  // Of sequences of at most so many key tiles.
  constexpr int pieces(int of_sequence) const {
    return std::min(most_pieces, std::max(parts, (of_sequence + most - 1) / most));
  }
};
constexpr PieceRule pieces_of_few() { return {.parts = 4, .least = 4, .most = 8, .most_pieces = 64}; }
constexpr PieceRule pieces_of_many() { return {.parts = 2, .least = 8, .most = 32, .most_pieces = 32}; }

// Where units are cut at the ends of ranges: fewer key tiles, and their parts would take longer than their keys.
constexpr int kLeastRange = 4;

constexpr int kFirstUnitBytes = 112;  // see first_unit.cuh

// The query heads of a KV head are shared by so many CTAs of a bundle, which read the same keys at the same time.
constexpr int head_shares(int group) { return group % kRows == 0 ? std::max(1, group / kRows) : 1; }

// The call as its kernels see it: each share is a KV head of its own.
inline DecodeParams share_heads(DecodeParams params) {
  int const shares = head_shares(params.group);
  params.heads_kv = params.heads_kv * shares;
  params.group = params.group / shares;
  return params;
}

}  // namespace flash_cute::sm90::decode::latent
