// What the CUDA kernels do not serve yet. Each line goes when its kernels have passed the tests on a GPU.
#pragma once

#include "checks.h"

namespace flash_cute {

// Lets tests run kernels that are not served yet, if FLASH_CUTE_TEST_UNSERVED is set at the first call.
inline bool unserved_allowed() {
  static bool const allowed = std::getenv("FLASH_CUTE_TEST_UNSERVED") != nullptr;
  return allowed;
}

inline void check_served_by_bwd(Problem const& problem) {
  FLASH_CUTE_CHECK(problem.softcap == 0, "softcap: expected None on CUDA, which has no kernel for it yet, got ",
                   problem.softcap);
  FLASH_CUTE_CHECK(!problem.has_sinks, "sinks: expected None on CUDA, which has no kernel for them yet, got a tensor");
  FLASH_CUTE_CHECK(!problem.has_alibi,
                   "alibi_slopes: expected None on CUDA, which has no kernel for them yet, got a tensor");
  FLASH_CUTE_CHECK(problem.head_dim_v == problem.head_dim, "v: expected q's head dim ", problem.head_dim,
                   " on CUDA, which has no kernel for a head dim of v's own yet, got ", problem.head_dim_v);
}

inline void check_served_by_fwd(Problem const& problem) {
  if (!unserved_allowed()) check_served_by_bwd(problem);
}

}  // namespace flash_cute
