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
#include "sm80/large/pipeline.cuh"
#include "sm80/large/products.cuh"
#undef load_matrices
#undef load_matrices_transposed
#undef store_shared
#undef copy_async
#undef load_shared_vector
#undef SM80_16x8x16_F32BF16BF16F32_TN

#include "sm80/large/steps.cuh"
#include "sm80/large/tile.h"

namespace inspect::sm80_large {

using namespace flash_cute;
using namespace flash_cute::sm80::large;
using flash_cute::sm80::kChipNames;
using flash_cute::sm80::kMaxSmemBytes;
using flash_cute::sm80::kNumChips;

using Element = cutlass::bfloat16_t;
using Scores = Shape<Int<kBlockM>, Int<kBlockN>>;
using Out = Shape<Int<kBlockM>, Int<kColumns>>;

// Where the tiles are that are recorded, in bytes.
constexpr uint32_t kLeftTile = 0, kRightTile = kLeftBytes;                          // of the scores
constexpr uint32_t kWeightTile = 0, kValueTile = kWeightBytes;                      // of the other product
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

// The copy of a tile: where each vector goes, and where it came from in rows of `stride` elements.
template <class Load>
void record_copy_of(Details& out, std::string const& name, Load const& load) {
  Array sources{{0, kThreads}, {}};
  static uint16_t const memory[1] = {};
  recorder.memory = memory;
  record(
      [&](int thread) {
        load(reinterpret_cast<Element const*>(recorder.memory), thread);
        sources.shape[0] = int(recorder.sources.size());
        sources.data.insert(sources.data.end(), recorder.sources.begin(), recorder.sources.end());
      },
      {{&out.arrays[name + ".copy"], &Recorder::copies}});
  out.arrays[name + ".copy.source"] = sources;
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
          fragments.multiply<Element, kOutBlocks>(tOrO);
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

inline Details recorded() {
  Details out;
  AddAll<decltype(entries())>::add(out);
  record_products(out);
  using Source = Rows<Element>;
  record_copy_of(out, "Q", [](Element const* memory, int thread) {
    load_chunk<kBlockM>(Source{memory, kChunk, kBlockM, kChunk}, kLeftTile, thread);
  });
  record_copy_of(out, "K", [](Element const* memory, int thread) {
    load_chunk<kBlockN>(Source{memory, kChunk, kBlockN, kChunk}, kRightTile, thread);
  });
  record_copy_of(out, "V", [](Element const* memory, int thread) {
    load_values(Source{memory, kColumns, kValueKeys, kColumns}, kValueTile, thread);
  });

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
  out.facts["left.tile"] = kLeftTile;
  out.facts["right.tile"] = kRightTile;
  out.facts["weights.tile"] = kWeightTile;
  out.facts["values.tile"] = kValueTile;
  return out;
}

// The parts of a CTA's shared memory behind its storage.
inline void add_ring(Details& out, Ring const& ring, int chunks, int fixed_bytes, char const* left) {
  if (ring.left_resident) out.buffers.push_back({left, fixed_bytes, chunks * kLeftBytes});
  int const begin = fixed_bytes + (ring.left_resident ? chunks * kLeftBytes : 0);
  out.buffers.push_back({"ring", begin, ring.stages * ring.stage_bytes()});
}

}  // namespace inspect::sm80_large
