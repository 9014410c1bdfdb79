// The schedule of a packed batch: sm90/forward/common/sequence_scheduler.cuh, run on the host by a warp of every CTA.
#pragma once

#include <vector>

#include "registry.h"
#include "warp.h"

#include "sm90/forward/common/sequence_scheduler.cuh"

namespace inspect::sm90_forward {

using namespace flash_cute;
using namespace flash_cute::sm90::forward;

// The parameters of a packed batch, as csrc/api/fwd.cpp makes them.
inline FwdParams packed_params(PackedProblem const& problem, int* ticket) {
  FwdParams params{};
  params.ticket = ticket;
  params.draws_tiles = true;
  params.batch = int(problem.cu_q.size()) - 1;
  params.heads_q = problem.heads_q;
  params.heads_kv = problem.heads_kv;
  params.len_q = problem.cu_q.back();
  params.len_k = problem.cu_k.back();
  params.head_dim = params.head_dim_v = problem.head_dim;
  params.sequences = {.cu_q = problem.cu_q.data(),
                      .cu_k = problem.cu_k.data(),
                      .used_q = nullptr,
                      .used_k = nullptr,
                      .window_left = problem.window_left,
                      .window_right = problem.window_right,
                      .tiles_before = nullptr,
                      .bottom_right = problem.bottom_right};
  return params;
}

// What the scheduler of a CTA waits for and writes to, with the tiles that it has published. A tile begins when the
// last one has ended, and takes as long as it has key tiles, and one unit more for what a tile costs besides.
template <int kRows, int kKeys>
struct Cta {
  struct TilePipeline {
    Cta& cta;
    // The tile of two draws before has been computed.
    void wait_empty(sm90::PipelineState<2>) {
      int const draws = int(cta.tiles.size());
      cta.wait_until(draws < 2 ? 0 : cta.tiles[draws - 2].end);
    }
    void publish(sm90::PipelineState<2>) { cta.add(cta.smem.tile[cta.tiles.size() & 1]); }
  };
  struct NextTile {
    Cta& cta;
    // The producer has kTilesAhead key tiles of the last tile left to load.
    void wait_full(sm90::PipelineState<1>) {
      Tile const& last = cta.tiles.back();
      cta.wait_until(std::max(last.begin, last.end - 1 - kTilesAhead));
    }
  };
  struct SharedStorage {
    SequenceTile tile[2];
    TilePipeline tile_pipeline;
    NextTile next_tile;
    Floors floors[32];
    TileNumbers own_tiles[32];
  };
  struct Traits {
    static constexpr int kBlockM = kRows;
    static constexpr int kBlockN = kKeys;
    using SharedStorage = Cta::SharedStorage;
  };
  struct Tile {
    SequenceTile place;
    TileRange range;
    int ticket, begin, end;
  };

  Cta(FwdParams const& params, int number, int ctas)
      : params(params),
        smem{.tile = {}, .tile_pipeline = {*this}, .next_tile = {*this}, .floors = {}, .own_tiles = {}},
        ctas(ctas),
        warp(1, number, ctas, [this] { schedule_sequences<Traits>(this->params, smem); }) {}

  void wait_until(int then) {
    wake = std::max(wake, then);
    warp.pause();
  }

  void add(SequenceTile const& place) {
    if (place.m_block < 0) return;
    TileRange const all = key_range<kRows, kKeys>(place.sequence, place.m_block);
    int const begin = std::max(wake, tiles.empty() ? 0 : tiles.back().end);
    int const ticket = warp.drawn < 0 ? warp.block() : ctas + warp.drawn;  // the first tile has the CTA's number
    tiles.push_back({place, all, ticket, begin, begin + place.keys.end - place.keys.begin + 1});
  }

  FwdParams const& params;
  SharedStorage smem;
  int ctas;
  int wake = 0;
  bool ended = false;
  std::vector<Tile> tiles;
  Warp warp;
};

// (11, tiles): m_block, head, sequence, of its range of key tiles begin, whole_begin, whole_end and end, the CTA, the
// ticket, and when it begins and ends. `number_of_ctas`: of those that draw tiles, of clusters one each.
template <int kBlockM, int kBlockN>
Array drawn_tiles(FwdParams const& params, int number_of_ctas) {
  using Simulated = Cta<kBlockM, kBlockN>;
  std::vector<std::unique_ptr<Simulated>> ctas;
  for (int number = 0; number < number_of_ctas; ++number) {
    ctas.push_back(std::make_unique<Simulated>(params, number, number_of_ctas));
  }
  while (true) {  // the CTA whose wait ends first has its turn
    Simulated* next = nullptr;
    for (auto& cta : ctas) {
      if (!cta->ended && (next == nullptr || cta->wake < next->wake)) next = cta.get();
    }
    if (next == nullptr) break;
    next->ended = !next->warp.run();
  }
  Array array{{11, 0}, {}};
  for (int number = 0; number < number_of_ctas; ++number) {
    for (auto const& tile : ctas[number]->tiles) {
      TileRange const& range = tile.range;
      int const end = tile.place.keys.end;
      array.data.insert(array.data.end(),
                        {tile.place.m_block, tile.place.head, tile.place.batch, tile.place.keys.begin,
                         std::min(range.whole_begin, end), std::min(range.whole_end, end), end, number, tile.ticket,
                         tile.begin, tile.end});
      ++array.shape[1];
    }
  }
  return array;
}

template <int kBlockM, int kBlockN>
Array packed_schedule(PackedProblem const& problem, int num_sms) {
  int ticket = 0;
  return drawn_tiles<kBlockM, kBlockN>(packed_params(problem, &ticket), num_sms);
}

}  // namespace inspect::sm90_forward
