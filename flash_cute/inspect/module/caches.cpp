// The schedule of attention over caches, as data: the families' own plans, and core/split_keys/work.cuh and merge.cuh,
// which a warp of every CTA runs here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <climits>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "warp.h"

// What these headers call besides. Those without a body are in functions that nothing calls here.
inline unsigned __ballot_sync(unsigned, bool value) {
  auto const& values = inspect::Warp::running->gather(value);
  unsigned bits = 0;
  for (int lane = 0; lane < inspect::Warp::kLanes; ++lane) bits |= unsigned(values[lane] != 0) << lane;
  return bits;
}
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(unsigned(value)); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask);
template <class T>
T __ldcg(T const* address);
template <class T>
T __hfma2(T a, T b, T c);
unsigned __byte_perm(unsigned a, unsigned b, unsigned selector);
int __dp4a(int a, int b, int c);
inline DeviceIndex blockDim;
float __fmul_rn(float a, float b);
float __fadd_rn(float a, float b);
float __fsub_rn(float a, float b);
float __fmaf_rn(float a, float b, float c);

#include "sm80/decode/split_keys/family.h"
#include "sm80/decode/split_keys/traits.cuh"
#include "sm80/decode/streamed/family.h"
#include "sm80/decode/streamed/traits.cuh"
#include "sm90/decode/latent/family.h"
#include "sm90/decode/latent/traits.cuh"
#include "sm90/decode/split_keys/family.h"
#include "sm90/decode/split_keys/traits.cuh"

#include "core/split_keys/merge.cuh"
#include "kernel_shape.h"

namespace py = pybind11;

namespace inspect {
namespace {

using namespace flash_cute;
using Table = std::vector<std::vector<int64_t>>;

// A call of packed sequences. `keys` are those that a sequence has after an append; below 0: there is no sequence.
struct CacheCall {
  std::vector<int> cu_q, keys;
  int heads_q, heads_kv, head_dim, head_dim_v, window_left, window_right;
  bool bottom_right;
};

KvCacheProblem problem_of(CacheCall const& call) {
  KvCacheProblem problem{};
  problem.call.batch = int(call.keys.size());
  problem.call.heads_q = call.heads_q;
  problem.call.heads_kv = call.heads_kv;
  problem.call.len_q = call.cu_q.back();
  problem.call.head_dim = call.head_dim;
  problem.call.head_dim_v = call.head_dim_v;
  problem.call.packed = true;
  problem.cache.capacity = std::max(1, *std::max_element(call.keys.begin(), call.keys.end()));
  problem.has_lengths = true;
  return problem;
}

// As csrc/api/kvcache_cuda.cpp makes them, as far as the schedule needs them.
DecodeParams params_of(CacheCall const& call, KvCacheProblem const& problem, DecodePlan const& plan, float* parts) {
  DecodeParams params{};
  params.parts = parts;
  params.table.capacity = problem.cache.capacity;
  params.cache_seqlens = call.keys.data();
  params.cu_q = call.cu_q.data();
  params.batch = problem.call.batch;
  params.heads_q = call.heads_q;
  params.heads_kv = call.heads_kv;
  params.group = call.heads_q / call.heads_kv;
  params.len_q = problem.call.len_q;
  params.head_dim = call.head_dim;
  params.head_dim_v = call.head_dim_v;
  params.window_left = call.window_left;
  params.window_right = call.window_right;
  params.bottom_right = call.bottom_right;
  params.long_rows = plan.long_rows;
  params.bundles = plan.bundles;
  params.most_pieces = plan.most_pieces;
  params.many_rows = plan.many_rows;
  params.part_rows = plan.part_rows;
  params.slot_rows = plan.slot_rows;
  return params;
}

// By a warp whose lanes all end; `program` gets the lane.
template <class Program>
void run_warp(Program const& program) {
  Warp warp(0, 0, 1, [&] { program(Warp::running->lane()); });
  while (warp.run()) {
  }
}

constexpr int64_t kInCta = -1;  // of a piece that goes into a fold which stays in its CTA

// Where a part begins in the workspace, in floats.
int64_t place_of(DecodeParams const& params, split_keys::Part const& part) { return part.acc - params.parts; }

// The pieces that a CTA computes, in its order: bundle, KV head, sequence, row tile, first row, rows, pieces of the
// unit, piece, its key tiles [begin, end), whether it is stored by itself, the place of its part, and the part's rows.
template <class Traits>
void add_pieces(DecodeParams const& params, int bundle, int head_kv, Table& pieces) {
  using split_keys::Part;
  run_warp([&](int lane) {
    split_keys::Walk<typename Traits::Cut> walk(params, bundle, head_kv);
    while (walk.next()) {
      split_keys::Unit const& unit = walk.unit();
      for (int piece = unit.piece_begin; lane == 0 && piece < unit.piece_end; ++piece) {
        Part const part = unit.has_first() ? Part::of_fold<Traits::kHeadDimV>(params, unit, bundle)
                                           : Part::of_piece<Traits::kHeadDimV>(params, unit, bundle,
                                                                               piece - unit.piece_begin);
        int64_t const place = unit.has_first() && unit.has_last() ? kInCta : place_of(params, part);
        int const begin = unit.begin_of(piece), end = std::max(begin, unit.end_of(piece));
        pieces.push_back({bundle, head_kv, unit.batch, unit.row_tile, unit.first_row, unit.rows, unit.pieces.count,
                          piece, begin, end, !unit.has_first(), place, part.row_max - part.acc});
      }
    }
  });
}

// What the second kernel does where the range of a bundle begins.
template <class Traits>
struct PlaceOfMerge : split_keys::Merge<Traits> {
  using Base = split_keys::Merge<Traits>;
  using Base::Base;

  // The place's bundle, the KV head, sequence, row tile, the bundles that have pieces, and the parts in their order:
  // for each the first piece, the one behind its last and its place.
  void add(int lane, Table& merges) {
    if (!this->find_unit() || lane != 0) return;
    auto const& unit = this->unit_;
    int const second = this->ranges_.begin(this->first_bundle_ + 1);
    int const begin = split_keys::pieces_before(second, this->first_, unit.pieces);
    merges.push_back(
        {this->bundle_, this->head_kv_, unit.batch, unit.row_tile, this->first_bundle_, this->last_bundle_});
    auto& row = merges.back();
    auto const add_part = [&](int from, int to, split_keys::Part const& part) {
      row.insert(row.end(), {from, to, place_of(this->params_, part)});
    };
    add_part(0, begin, split_keys::Part::of_fold<Traits::kHeadDimV>(this->params_, unit, this->first_bundle_));
    for (int piece = begin; piece < unit.pieces.count; ++piece) add_part(piece, piece + 1, this->part_of(piece));
  }
};

template <class Family>
DecodeParams as_launched(DecodeParams const& params) {
  if constexpr (std::is_same_v<Family, sm90::decode::latent::Family>) {
    return sm90::decode::latent::share_heads(params);
  } else {
    return params;
  }
}

template <class Family, class Traits>
py::dict schedule(CacheCall const& call, Gpu gpu, HeadDims dims) {
  KvCacheProblem const problem = problem_of(call);
  DecodePlan plan{};
  plan.head_dim = dims.head_dim;
  plan.head_dim_v = dims.head_dim_v;
  Family::plan(plan, problem, gpu);
  std::unique_ptr<float[]> const parts(new float[plan.workspace_bytes / sizeof(float) + 1]);  // none is written
  DecodeParams const params = as_launched<Family>(params_of(call, problem, plan, parts.get()));
  Table pieces, merges;
  for (int bundle = 0; bundle < plan.bundles; ++bundle) {
    for (int head = 0; head < params.heads_kv; ++head) {
      add_pieces<Traits>(params, bundle, head, pieces);
      if (bundle == 0) continue;
      run_warp([&](int lane) { PlaceOfMerge<Traits>(params, bundle, head).add(lane, merges); });
    }
  }
  py::dict result;
  result["shape"] = shape_of(plan.shape);
  result["bundles"] = plan.bundles;
  result["heads_kv"] = int(params.heads_kv);
  result["part_columns"] = dims.head_dim_v + 2;
  result["workspace_bytes"] = plan.workspace_bytes;
  result["long_rows"] = plan.long_rows;
  result["pieces"] = pieces;
  result["merges"] = merges;
  return result;
}

using Half = cutlass::half_t;
using Schedule = py::dict (*)(CacheCall const&, Gpu, HeadDims);
struct Entry {
  char const* arch;
  char const* folder;
  HeadDims dims;
  Schedule schedule;
};

template <int kHeadDim, int kHeadDimV>
constexpr Entry kHopper{"sm90", "decode/split_keys", {kHeadDim, kHeadDimV},
                        &schedule<sm90::decode::split_keys::Family,
                                  sm90::decode::split_keys::Traits<Half, kHeadDim, kHeadDimV>>};
template <int kHeadDim>
constexpr Entry kPortable{"sm80", "decode/split_keys", {kHeadDim, kHeadDim},
                          &schedule<sm80::decode::split_keys::Family,
                                    sm80::decode::split_keys::Traits<Half, kHeadDim, kHeadDim>>};
template <int kHeadDim, int kHeadDimV>
constexpr Entry kStreamed{"sm80", "decode/streamed", {kHeadDim, kHeadDimV},
                          &schedule<sm80::decode::streamed::Family,
                                    sm80::decode::streamed::Traits<Half, kHeadDim, kHeadDimV>>};
constexpr Entry kLatent{"sm90", "decode/latent", {576, 512},
                        &schedule<sm90::decode::latent::Family, sm90::decode::latent::Traits<Half, 576, 512>>};

// Those of csrc/families.json.
constexpr Entry kEntries[] = {kPortable<64>,       kPortable<128>,       kStreamed<256, 256>, kStreamed<576, 512>,
                              kStreamed<1024, 1024>, kHopper<64, 64>,    kHopper<128, 128>,   kHopper<192, 192>,
                              kHopper<192, 128>,   kHopper<256, 256>,    kLatent};

CacheCall to_call(py::dict call, HeadDims dims) {
  auto get = [&](char const* name) { return call[name].cast<int>(); };
  return {call["cu_q"].cast<std::vector<int>>(), call["keys"].cast<std::vector<int>>(), get("heads_q"),
          get("heads_kv"), dims.head_dim, dims.head_dim_v, get("window_left"), get("window_right"),
          get("bottom_right") != 0};
}

py::list kernels() {
  py::list all;
  for (Entry const& entry : kEntries) {
    all.append(py::make_tuple(entry.arch, entry.folder, entry.dims.head_dim, entry.dims.head_dim_v));
  }
  return all;
}

}  // namespace
}  // namespace inspect

PYBIND11_MODULE(_traits, module) {
  module.attr("NO_LIMIT") = flash_cute::kNoLimit;
  module.def("kernels", &inspect::kernels);
  module.def("schedule", [](size_t index, py::dict call, int capability, int num_sms) {
    inspect::Entry const& entry = std::data(inspect::kEntries)[index];
    return entry.schedule(inspect::to_call(call, entry.dims), {.capability = capability, .num_sms = num_sms},
                          entry.dims);
  });
}
