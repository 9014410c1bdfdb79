// The kernel arguments of the Hopper forward, built on the host.
#pragma once

#include <cuda.h>

#include "contract/params.h"

namespace flash_cute::sm90::forward {

struct KernelArgs {
  CUtensorMap q;  // box (64, ColumnsQK::kChunk)
  CUtensorMap k;  // box (BLK_N, ColumnsQK::kChunk)
  CUtensorMap v;  // box (BLK_N, ColumnsV::kChunk)
  FwdParams params;
};

}  // namespace flash_cute::sm90::forward
