// What the sm80 kernels for head dims above 256 do to shared memory, recorded of every thread: a chunk of the scores'
// product, a key tile of the other, and the copies and stores that bring and take what they multiply. The forward's
// names: of a backward Q and K are this side and the other, P is W, V is X and O a gradient.
#pragma once

#include "recorder.h"

#include "describe.h"
#include "kernel_shape.h"
#include "problem.h"

#define load_matrices record_matrices
#define load_matrices_transposed record_matrices_transposed
#define store_shared record_store
#define copy_async record_copy
#define load_shared_vector record_vector
#define SM80_16x8x16_F32BF16BF16F32_TN RecordedMma
#include "sm80/streaming/pipeline.cuh"
#include "sm80/streaming/products.cuh"
#undef load_matrices
#undef load_matrices_transposed
#undef store_shared
#undef copy_async
#undef load_shared_vector
#undef SM80_16x8x16_F32BF16BF16F32_TN

#include "sm80/streaming/steps.cuh"
#include "sm80/streaming/tile.h"

namespace inspect::sm80_streaming {

using namespace flash_cute;
using namespace flash_cute::sm80::streaming;
using flash_cute::sm80::kChipNames;
using flash_cute::sm80::kMaxSmemBytes;
using flash_cute::sm80::kNumChips;

using Element = cutlass::bfloat16_t;
using Scores = Shape<Int<kBlockM>, Int<kBlockN>>;
using Out = Shape<Int<kBlockM>, Int<kColumns>>;

// Where the tiles are that are recorded, in bytes.
constexpr uint32_t kLeftTile = 0, kRightTile = kLeftBytes;      // of the scores
constexpr uint32_t kWeightTile = 0, kValueTile = kWeightBytes;  // of the other product
constexpr uint32_t kOutTiles = 0;

// Runs `thread_runs(thread)` for each thread. `field` of what it records: (calls, threads).
template <class Runs>
void record(Runs const& thread_runs, std::vector<std::pair<Array*, std::vector<uint32_t> Recorder::*>> const& fields) {
  for (auto const& [array, field] : fields) *array = {{0, kThreads}, {}};
  for (int thread = 0; thread < kThreads; ++thread) {
    auto const* const memory = recorder.memory;
    recorder = {};
    recorder.memory = memory;
    thread_runs(thread);
    for (auto const& [array, field] : fields) {
      auto const& values = recorder.*field;
      array->shape[0] = int(values.size());
      array->data.insert(array->data.end(), values.begin(), values.end());
    }
  }
}

inline Array of_last(std::vector<int> const& values, int rows) {
  return {{rows, int(values.size()) / rows}, values};
}

// The first `calls` of what each thread has recorded, and the rest.
inline std::pair<Array, Array> split_calls(Array const& array, int calls) {
  std::pair<Array, Array> parts{{{calls, kThreads}, {}}, {{array.shape[0] - calls, kThreads}, {}}};
  for (int i = 0; i < int(array.data.size()); ++i) {
    (i % array.shape[0] < calls ? parts.first : parts.second).data.push_back(array.data[i]);
  }
  return parts;
}

// The copies of two steps, each by load(a thread's cursor): where each vector goes, and which elements it has. Of two
// operands with one cursor the first one has `calls` vectors per thread and step.
template <class MakeCursor, class Load>
void record_copies(Details& out, std::vector<std::string> const& names, int calls, MakeCursor const& make_cursor,
                   Load const& load) {
  static uint16_t const memory[1] = {};
  recorder.memory = memory;
  auto const* const elements = reinterpret_cast<Element const*>(memory);
  Array targets[2], sources[2];
  for (int steps = 0; steps < 2; ++steps) {
    sources[steps] = {{0, kThreads}, {}};
    record(
        [&](int thread) {
          auto cursor = make_cursor(elements, thread);
          for (int step = 0; step < steps; ++step) load(cursor);
          recorder.copies.clear();
          recorder.sources.clear();
          load(cursor);
          sources[steps].shape[0] = int(recorder.sources.size());
          sources[steps].data.insert(sources[steps].data.end(), recorder.sources.begin(), recorder.sources.end());
        },
        {{&targets[steps], &Recorder::copies}});
  }
  auto const add = [&](std::string const& suffix, Array const& array) {
    auto const parts = split_calls(array, calls);
    out.arrays[names[0] + suffix] = parts.first;
    if (names.size() > 1) out.arrays[names[1] + suffix] = parts.second;
  };
  add(".copy", targets[0]);
  add(".copy.source", sources[0]);
  add(".copy.next", targets[1]);
  add(".copy.next.source", sources[1]);
}

// A tensor whose values are the numbers of its registers.
template <class Tensor>
auto numbered(Tensor const& accumulators) {
  auto numbers = make_tensor_like<Element>(accumulators);
  for (int i = 0; i < size(numbers); ++i) numbers.data()[i] = Element::bitcast(uint16_t(i));
  return numbers;
}

inline void record_products(Details& out) {
  auto tSrS = partition_fragment_C(ScoreMma<Element>{}, Scores{});  // (4, 2, 4)
  record(
      [&](int thread) {
        auto const lanes = LaneOffsets::of(thread);
        recorder.accumulators = &tSrS(0);
        for (int step = 0; step < kChunk / 16; ++step) {
          ScoreFragments fragments;
          fragments.load(lanes.left + kLeftTile, lanes.right + kRightTile, step);
          fragments.multiply<Element>(tSrS);
        }
      },
      {{&out.arrays["S.ldsm"], &Recorder::matrices}});
  out.arrays["S.ldsm.transposed"] = of_last(recorder.transposed, 1);
  out.arrays["S.products"] = of_last(recorder.products, 7);

  auto tOrO = partition_fragment_C(OutMma<Element>{}, Out{});  // (4, 4, kOutBlocks)
  record(
      [&](int thread) {
        auto const lanes = LaneOffsets::of(thread);
        recorder.accumulators = &tOrO(0);
        for (int step = 0; step < kBlockN / kValueKeys; ++step) {
          OutFragments fragments;
          fragments.load<kOutBlocks>(lanes.weights + kWeightTile, lanes.values + kValueTile, step);
          fragments.multiply<Element, 0, kOutBlocks>(tOrO);
        }
      },
      {{&out.arrays["O.ldsm"], &Recorder::matrices}});
  out.arrays["O.ldsm.transposed"] = of_last(recorder.transposed, 1);
  out.arrays["O.products"] = of_last(recorder.products, 7);

  auto const weights = numbered(tSrS);
  record([&](int thread) { store_weights(weights, kWeightTile, thread); },
         {{&out.arrays["P.store"], &Recorder::stores}, {&out.arrays["P.store.registers"], &Recorder::values}});
  auto const results = numbered(tOrO);
  record([&](int thread) { store_out(results, kOutTiles, thread); },
         {{&out.arrays["O.store"], &Recorder::stores}, {&out.arrays["O.store.registers"], &Recorder::values}});
}

// Never run: see describe.h.
inline auto entries() {
  ScoreMma<Element> score_mma;
  OutMma<Element> out_mma;
  auto tSrS = partition_fragment_C(score_mma, Scores{});
  auto tOrO = partition_fragment_C(out_mma, Out{});
  return tuple_cat(mma_c_entry<"S.mma.coord">(score_mma, make_identity_layout(Scores{})),
                   index_entry<"S.mma.register">(tSrS.layout()),
                   mma_c_entry<"O.mma.coord">(out_mma, make_identity_layout(Out{})),
                   index_entry<"O.mma.register">(tOrO.layout()));
}

// The copies into the ring and, where they are resident, of this side's chunks.
inline void record_loads(Details& out, bool left_resident) {
  using Source = Rows<Element>;
  constexpr int kSteps = 2;  // that are recorded
  constexpr int kLeftVectors = kBlockM * kChunk / (8 * kThreads), kRightVectors = 2 * kLeftVectors;
  static_assert(kBlockN == 2 * kBlockM);
  auto const left = [](Element const* memory) { return Source{memory, kSteps * kChunk, kBlockM, kSteps * kChunk}; };
  auto const right = [](Element const* memory, int thread) {
    return Cursor<Element>::of_chunks(Source{memory, kSteps * kChunk, kBlockN, kSteps * kChunk}, thread);
  };
  if (left_resident) {
    record_copies(
        out, {"Q"}, kLeftVectors,
        [&](Element const* memory, int thread) { return Cursor<Element>::of_chunks(left(memory), thread); },
        [](Cursor<Element>& cursor) { cursor.load_chunk<kBlockM>(kLeftTile); });
    record_copies(out, {"K"}, kRightVectors, right,
                  [](Cursor<Element>& cursor) { cursor.load_chunk<kBlockN>(kRightTile); });
  } else {
    record_copies(
        out, {"Q", "K"}, kLeftVectors,
        [&](Element const* memory, int thread) {
          return std::pair{right(memory, thread), OwnRows<Element>::of(left(memory), thread)};
        },
        [](std::pair<Cursor<Element>, OwnRows<Element>>& cursors) {
          cursors.first.load_chunks<kBlockN, kBlockM>(kRightTile, cursors.second, kSteps * kChunk, kLeftTile);
        });
  }
  record_copies(
      out, {"V"}, kRightBytes / (16 * kThreads),
      [](Element const* memory, int thread) {
        return Cursor<Element>::of_values(Source{memory, kColumns, kSteps * kValueKeys, kColumns}, thread);
      },
      [](Cursor<Element>& cursor) { cursor.load_values(kValueTile); });
}

inline Details recorded(bool left_resident) {
  Details out;
  AddAll<decltype(entries())>::add(out);
  record_products(out);
  record_loads(out, left_resident);

  // Each vector of the result, and the address that it was read from.
  std::vector<uint4> written(kBlockM * kColumns / 8);
  record(
      [&](int thread) {
        write_rows(reinterpret_cast<Element*>(written.data()), kColumns, kOutTiles, kBlockM, kColumns, thread);
      },
      {{&out.arrays["O.read"], &Recorder::vectors}});
  Array& rows = out.arrays["O.rows"] = {{kColumns / 8, kBlockM}, {}};
  for (uint4 const& vector : written) rows.data.push_back(int(vector.x));
  out.facts["element_bytes"] = sizeof(Element);
  add_atom<ScoreMma<Element>::AtomShape_MNK>(out);
  return out;
}

// The parts of a CTA's shared memory behind its storage.
inline void add_ring(Details& out, Ring const& ring, int chunks, int fixed_bytes, char const* left) {
  if (ring.left_resident) out.buffers.push_back({left, fixed_bytes, chunks * kLeftBytes});
  int const begin = fixed_bytes + (ring.left_resident ? chunks * kLeftBytes : 0);
  out.buffers.push_back({"ring", begin, ring.stages * ring.stage_bytes()});
}

}  // namespace inspect::sm80_streaming
