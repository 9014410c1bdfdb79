// Random calls of the Hopper kernels of attention over a cache, see caches.h: of few rows and of many, of 16 bits and
// of float8.
#include "sm90/decode/split_keys/launch.cuh"

#include "caches.h"

namespace {

using namespace flash_cute;
namespace split_keys = sm90::decode::split_keys;

enum class Stored { kAsQ, kE4M3, kE5M2 };
constexpr char const* kStoredNames[] = {"", " e4m3", " e5m2"};

struct Case : CacheCase {
  int most_pieces;
  Stored k, v;

  std::string describe() const {
    std::string const stored = std::string(kStoredNames[int(k)]) + kStoredNames[int(v)];
    return CacheCase::describe() + " pieces " + std::to_string(most_pieces) + stored;
  }
};

Case draw_case(Random& random) {
  Case c{};
  c.heads_kv = random.range(1, 2);
  c.heads_q = c.heads_kv * (random.chance(0.5) ? 1 : random.range(1, 16));
  if (random.chance(0.5)) {
    c.k = random.chance(0.5) ? Stored::kE4M3 : Stored::kE5M2;
    c.v = random.chance(0.5) ? Stored::kE4M3 : Stored::kE5M2;
  }
  c.draw(random, 60);
  c.most_pieces = random.range(1, 6);
  return c;
}

template <class Element, class K, class V>
void run(Case const& c, Random& random) {
  run_over_cache<Element, K, V>(c, random, [&](DecodeParams& params) {
    CacheParts const parts(params, c.sms, c.heads_kv, c.most_pieces, kManyRows);
    params.k_is_e5m2 = c.k == Stored::kE5M2;
    params.v_is_e5m2 = c.v == Stored::kE5M2;
    DecodePlan plan{};
    plan.dtype = c.is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
    plan.float8_cache = c.k != Stored::kAsQ;
    plan.ctas = int64_t{params.bundles} * c.heads_kv;
    return split_keys::launch<HEAD_DIM, HEAD_DIM_V>(plan, params, nullptr);
  });
}

template <class Element, class K>
void run_beside(Case const& c, Random& random) {
  if (c.v == Stored::kE4M3) return run<Element, K, cutlass::float_e4m3_t>(c, random);
  run<Element, K, cutlass::float_e5m2_t>(c, random);
}

}  // namespace

int main(int argc, char** argv) {
  return run_cases<true>(argc, argv, draw_case, []<class Element>(Case const& c, Random& random) {
    if (c.k == Stored::kAsQ) return run<Element, Element, Element>(c, random);
    if (c.k == Stored::kE4M3) return run_beside<Element, cutlass::float_e4m3_t>(c, random);
    run_beside<Element, cutlass::float_e5m2_t>(c, random);
  });
}
