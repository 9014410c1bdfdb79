// What the CUDA kernels do not serve yet. Each line goes when its kernels come.
#pragma once

#include "checks.h"

namespace flash_cute {

inline void check_served_on_cuda(Problem const& problem) {
  FLASH_CUTE_CHECK(problem.softcap == 0, "softcap: expected None on CUDA, which has no kernel for it yet, got ",
                   problem.softcap);
  FLASH_CUTE_CHECK(!problem.has_sinks, "sinks: expected None on CUDA, which has no kernel for them yet, got a tensor");
  FLASH_CUTE_CHECK(!problem.has_alibi,
                   "alibi_slopes: expected None on CUDA, which has no kernel for them yet, got a tensor");
  FLASH_CUTE_CHECK(problem.head_dim_v == problem.head_dim, "v: expected q's head dim ", problem.head_dim,
                   " on CUDA, which has no kernel for a head dim of v's own yet, got ", problem.head_dim_v);
}

}  // namespace flash_cute
