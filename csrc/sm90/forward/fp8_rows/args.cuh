// The kernel arguments, built on the host.
#pragma once

#include <cuda.h>

#include "contract/fp8.h"
#include "contract/params.h"

namespace flash_cute::sm90::forward::fp8_rows {

struct KernelArgs {
  CUtensorMap q;  // box (64, ColumnsQK::kChunk)
  CUtensorMap k;  // box (BLK_N, ColumnsQK::kChunk)
  CUtensorMap v;  // box (BLK_N, ColumnsV::kChunk)
  FwdParams params;
  Fp8Terms fp8;
};

}  // namespace flash_cute::sm90::forward::fp8_rows
