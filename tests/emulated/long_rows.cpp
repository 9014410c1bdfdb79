// Random calls of the Hopper kernel of long sequences over a cache, see caches.h.
#include "sm90/decode/long_rows/launch.cuh"

#include "caches.h"

namespace {

using namespace flash_cute;
namespace long_rows = sm90::decode::long_rows;

struct Case : CacheCase {
  int ctas;

  std::string describe() const {
    return CacheCase::describe() + " least " + std::to_string(least) + " ctas " + std::to_string(ctas);
  }
};

Case draw_case(Random& random) {
  Case c{};
  c.heads_kv = random.range(1, 2);
  c.heads_q = c.heads_kv * random.range(1, 2);
  c.draw(random, long_rows::kernel_shape(HEAD_DIM).block_m + 70, /*single_rows=*/true);
  c.least = c.packed ? random.range(1, 12) : 1;
  c.ctas = random.range(1, 3);
  return c;
}

template <class Element>
void run(Case const& c, Random& random) {
  run_over_cache<Element, Element, Element>(c, random, [&](DecodeParams& params) {
    params.long_rows = c.least;
    DecodePlan plan{};
    plan.dtype = c.is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
    plan.long_ctas = c.ctas;
    return long_rows::launch<Element, HEAD_DIM>(plan, params, nullptr);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return run_cases<true>(argc, argv, draw_case,
                         []<class Element>(Case const& c, Random& random) { run<Element>(c, random); });
}
