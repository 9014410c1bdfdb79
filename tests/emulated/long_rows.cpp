// Random calls of the Hopper kernel of long sequences over a cache, of 16 bits and of float8, see caches.h.
#include "sm90/decode/long_rows/launch.cuh"

#include "caches.h"

namespace {

using namespace flash_cute;
namespace long_rows = sm90::decode::long_rows;
constexpr bool kReadsFloat8 = long_rows::has_kernel(HEAD_DIM, HEAD_DIM, /*float8_cache=*/true);

enum class Stored { kAsQ, kE4M3, kE5M2 };
constexpr char const* kStoredNames[] = {"", " e4m3", " e5m2"};

struct Case : CacheCase {
  int ctas;
  Stored k, v;

  std::string describe() const {
    std::string const stored = std::string(kStoredNames[int(k)]) + kStoredNames[int(v)];
    return CacheCase::describe() + " least " + std::to_string(least) + " ctas " + std::to_string(ctas) + stored;
  }
};

Case draw_case(Random& random) {
  Case c{};
  c.heads_kv = random.range(1, 2);
  c.heads_q = c.heads_kv * random.range(1, 2);
  if (kReadsFloat8 && random.chance(0.5)) {
    c.k = random.chance(0.5) ? Stored::kE4M3 : Stored::kE5M2;
    c.v = random.chance(0.5) ? Stored::kE4M3 : Stored::kE5M2;
  }
  c.draw(random, long_rows::kernel_shape(HEAD_DIM, /*float8_cache=*/false).block_m + 70);
  c.least = c.packed ? random.range(1, 12) : 1;
  c.ctas = random.range(1, 3);
  return c;
}

template <class Element, class K, class V>
void run(Case const& c, Random& random) {
  run_over_cache<Element, K, V>(c, random, [&](DecodeParams& params) {
    params.long_rows = c.least;
    params.k_is_e5m2 = c.k == Stored::kE5M2;
    params.v_is_e5m2 = c.v == Stored::kE5M2;
    DecodePlan plan{};
    plan.dtype = c.is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
    plan.float8_cache = c.k != Stored::kAsQ;
    plan.long_ctas = c.ctas;
    return long_rows::launch<Element, HEAD_DIM>(plan, params, nullptr);
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
