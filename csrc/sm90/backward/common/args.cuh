// The kernel arguments of a Hopper backward, built on the host.
#pragma once

#include <cuda.h>

#include "contract/params.h"

namespace flash_cute::sm90::backward {

struct KernelArgs {
  CUtensorMap q;     // box (BLK_M, kChunk)
  CUtensorMap dout;  // box (BLK_M, kChunk)
  CUtensorMap k;     // box (BLK_N, kChunk), of 192/128 (BLK_N, 32)
  CUtensorMap v;     // box (BLK_N, kChunk)
  CUtensorMap dk;    // box (64, kChunk)
  CUtensorMap dv;    // box (64, kChunk)
  CUtensorMap dq;    // box (64, kChunk), above head dim 128
  BwdParams params;
};

}  // namespace flash_cute::sm90::backward
