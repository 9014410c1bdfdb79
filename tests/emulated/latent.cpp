// Random calls of the Hopper kernels of latent attention over a cache, see caches.h: values are columns of the keys.
#include "sm90/decode/latent/launch.cuh"

#include "caches.h"

namespace {

using namespace flash_cute;
namespace latent = sm90::decode::latent;

CacheCase draw_case(Random& random) {
  constexpr int kGroups[] = {1, 4, 16, 40, 64, 128};
  bool const prompts = random.chance(0.25);  // the first rows do not see the last pieces
  CacheCase c{};
  c.heads_kv = 1;
  c.heads_q = kGroups[random.range(0, prompts ? 1 : 5)];
  c.draw(random, prompts ? 250 : 6, prompts);
  c.cut_at_ranges = random.chance(0.5);
  if (random.chance(0.2)) c.sms = random.range(5, 12);  // ranges are shorter than pieces
  return c;
}

template <class Element>
void run(CacheCase const& c, Random& random) {
  run_over_cache<Element, Element, void>(c, random, [&](DecodeParams& params) {
    int const shares = latent::head_shares(params.group), tiles = c.capacity / latent::kTileKeys + 1;
    int const pieces = std::max(latent::pieces_of_few().pieces(tiles), latent::pieces_of_many().pieces(tiles));
    CacheParts const parts(params, c.sms, c.heads_kv * shares, c.cut_at_ranges ? 1 : pieces, latent::kRows);
    DecodePlan plan{};
    plan.dtype = c.is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
    plan.ctas = int64_t{params.bundles} * c.heads_kv * shares;
    return latent::launch<HEAD_DIM, HEAD_DIM_V>(plan, params, nullptr);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return run_cases<true>(argc, argv, draw_case,
                         []<class Element>(CacheCase const& c, Random& random) { run<Element>(c, random); });
}
