// The scheduler of batches whose sequences are read at run time: warp 1 of the producer warpgroup publishes the tiles.
//
// The row tiles of all sequences and query heads have numbers, those of one sequence side by side. A CTA's first tile
// has the CTA's own number; the numbers of the others it draws from the ticket counter. Where there are few tiles, as
// far as the host knows, they are dealt without a counter: its memory and the zeroing cost the host 3 us. The warp
// holds 32 neighbouring sequences, one per lane, with the prefix sum of their numbers of tiles, and moves on until they
// contain the next number, which is always larger than the last one. Nothing is computed before the launch, and nothing
// on the host depends on the lengths.
//
// The sequences are passed over up to three times, first those longer than half of the longest one, last those not
// longer than a quarter: the tiles that take longest must not be left to the end. In a sequence, the order of tiles is
// that of a dense batch with a mask (TileOrder).
#pragma once

#include "core/mask.cuh"
#include "core/sequence.cuh"
#include "core/warp_sum.cuh"
#include "scheduler.cuh"
#include "sm90/common/pipeline.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::forward {

constexpr unsigned kAllLanes = 0xffffffff;

// The passes over the sequences, by the number of their keys.
struct LengthPasses {
  // For more sequences the longest one is not looked for, and there is one pass: they take turns often enough.
  static constexpr int kMostSequences = 1024;

  int longest;  // 0: not known
  int last;     // index of the last pass

  CUTE_DEVICE LengthPasses(FwdParams const& params, int lane) : longest(0), last(0) {
    if (params.sequences.cu_k == nullptr || params.batch > kMostSequences) return;
#pragma unroll 4
    for (int index = lane; index < params.batch; index += 32) {
      longest = max(longest, key_extent(params, index, /*floor=*/0).used);
    }
    longest = __reduce_max_sync(kAllLanes, longest);
    last = 2;
  }

  CUTE_DEVICE bool contains(int pass, int keys) const {
    return (pass == 0 || keys <= longest >> pass) && (pass == last || keys > longest >> (pass + 1));
  }
};

// The order of one sequence's row tiles. Heads whose K and V fit in L2 together are processed together.
CUTE_DEVICE TileOrder sequence_order(FwdParams const& params, Sequence const& sequence, int m_blocks) {
  constexpr int kL2Elements = (32 << 20) / 2;  // of K and V, 16 bits each
  int const heads_per_kv = params.heads_q / params.heads_kv;
  int const heads = max(1, kL2Elements / (params.head_dim + params.head_dim_v) / max(1, sequence.len_k)) * heads_per_kv;
  int const group = min(heads, params.heads_q);
  return {.m_blocks = m_blocks,
          .heads_q = params.heads_q,
          .heads_per_kv = heads_per_kv,
          .num_heads = params.heads_q,
          .group = group,
          .last_group = (params.heads_q - 1) / group,
          .longest_first = true};
}

// Where a CTA's tile numbers come from.
struct CtaTickets {
  CUTE_DEVICE int first() const { return blockIdx.x; }
  CUTE_DEVICE int number() const { return gridDim.x; }  // of the first ones

  // The next number, by the whole warp.
  CUTE_DEVICE int draw(FwdParams const& params, int lane) {
    int ticket = 0;
    if (lane == 0) ticket = gridDim.x + atomicAdd(params.ticket, 1);
    return __shfl_sync(kAllLanes, ticket, 0);
  }
};

// The floors of the next 32 sequences, of which this lane has `index`, from those of the 32 before. By the whole warp.
CUTE_DEVICE void advance_floors(FwdParams const& params, int index, Floors volatile& own) {
  auto const next = [](int begin, int floor_before) {
    return inclusive_warp_max(max(begin, __shfl_sync(kAllLanes, floor_before, 31)));
  };
  own.rows = next(row_begin(params, index), own.rows);
  own.keys = next(key_begin(params, index), own.keys);
}

// The numbers of a lane's tiles: in shared memory where there is room, for want of registers.
template <class SharedStorage>
CUTE_DEVICE auto& own_tiles(SharedStorage& smem, int lane, TileNumbers& in_registers) {
  if constexpr (requires { smem.own_tiles; }) {
    return const_cast<TileNumbers volatile&>(smem.own_tiles[lane]);
  } else {
    return in_registers;
  }
}

template <class Traits, class Tickets = CtaTickets>
CUTE_DEVICE void schedule_sequences(FwdParams const& params, typename Traits::SharedStorage& smem,
                                    Tickets tickets = {}) {
  constexpr int kBlockM = Traits::kBlockM;
  int const lane = threadIdx.x % 32;
  LengthPasses const passes(params, lane);
  int pass = 0, group = -32;  // the 32 sequences from `group` on
  int group_end = 0;          // tile numbers below it belong to them or to sequences before
  // Of this lane's sequence.
  Floors volatile& floors = smem.floors[lane];
  TileNumbers in_registers{};
  auto& own = own_tiles(smem, lane, in_registers);
  auto const clear_floors = [&] {
    floors.rows = 0;
    floors.keys = 0;
  };
  auto const read = [&](int index) { return read_sequence(params, index, {floors.rows, floors.keys}); };
  clear_floors();
  int count = 0;  // key tiles of the tiles published so far
  int ticket = tickets.first();
#pragma unroll 1
  for (int tile_number = 0;; ++tile_number) {
    while (ticket >= group_end && pass <= passes.last) {
      group += 32;
      if (group >= sequence_count(params)) {
        group = 0;
        clear_floors();
        if (++pass > passes.last) break;
      }
      advance_floors(params, group + lane, floors);
      int tiles = 0;
      if (group + lane < sequence_count(params)) {
        Sequence const sequence = read(group + lane);
        if (passes.contains(pass, sequence.len_k)) tiles = ceil_div(sequence.rows, kBlockM) * params.heads_q;
      }
      int const end = group_end + inclusive_warp_sum(tiles);
      own.begin = end - tiles;
      own.end = end;
      group_end = __shfl_sync(kAllLanes, end, 31);
    }
    bool const exists = pass <= passes.last;
    bool const mine = exists ? own.begin <= ticket && ticket < own.end : lane == 0;
    smem.tile_pipeline.wait_empty(at_step(tile_number));  // the tile before the last is not read any more
    auto& tile = smem.tile[tile_number & 1];  // a SequenceTile, or pair::RowTile
    int key_tiles = 0;
    if (mine) {
      tile.m_block = -1;
      if (exists) {
        Sequence const sequence = read(group + lane);
        TileOrder const order = sequence_order(params, sequence, ceil_div(sequence.rows, kBlockM));
        RowTileCoord const coord = order.coord(ticket - own.begin);
        TileRange range = key_range<kBlockM, Traits::kBlockN>(sequence, coord.m_block);
        if (coord.m_block * kBlockM >= sequence.len_q) range.end = range.begin;  // rows that are not used
        key_tiles = range.end - range.begin;
        tile.m_block = coord.m_block;
        tile.head = coord.head;
        tile.head_kv = coord.head / order.heads_per_kv;
        tile.batch = group + lane;
        tile.keys = {range.begin, range.end, count};
        tile.parts = 0;
        // Only where it is used: in the other kernels the warp has no registers left for it.
        if constexpr (requires { tile.wave; }) tile.wave = order.wave(coord.m_block, tickets.number());
        tile.sequence = sequence;
      }
      smem.tile_pipeline.publish(at_step(tile_number));
    }
    if (!exists) break;
    count += __reduce_add_sync(kAllLanes, key_tiles);
    if (!params.draws_tiles) {
      ticket = dealt_number(tickets.first(), tickets.number(), tile_number + 1);
      continue;
    }
    // A number drawn earlier than needed is a tile that no idle CTA can take: drawn two tiles ahead, causal tiles of
    // different lengths would leave the SMs idle for 4 to 14 % of the time (simulated).
    smem.next_tile.wait_full({0, tile_number & 1});  // the producer will soon have loaded the tile
    ticket = tickets.draw(params, lane);
  }
}

}  // namespace flash_cute::sm90::forward
