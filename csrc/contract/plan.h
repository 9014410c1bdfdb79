// What the host decides before a launch: the launch, `explain` and the tests all read it. No torch, no CuTe.
#pragma once

#include <algorithm>
#include <cstdint>

#ifndef FLASH_CUTE_NO_CUDA
#include <cuda_runtime_api.h>
#else  // a build without kernels has no CUDA headers; only the names are needed
using cudaError_t = int;
using cudaStream_t = void*;
#endif

#include "accumulate.h"
#include "kernel_shape.h"
#include "params.h"
#include "variant.h"

namespace flash_cute {

enum class DType { kFloat16, kBFloat16, kFloat8 };  // with kFloat8 Fp8Terms says each tensor's

constexpr int64_t kNoPart = -1;

// Where each part of a workspace begins, in bytes; kNoPart where the kernel has none.
struct FwdWorkspace {
  int64_t ticket = kNoPart;
  int64_t part_flags = kNoPart;
  int64_t parts = kNoPart;
  int64_t tiles_before = kNoPart;
  int64_t zeroed = 0;  // so many bytes from the ticket on are set to 0 before the kernel reads them
  int64_t bytes = 0;
};

struct BwdWorkspace {
  int64_t dq_acc = kNoPart;
  int64_t lse_log2 = kNoPart;
  int64_t delta = kNoPart;
  int64_t semaphores = kNoPart;
  int64_t counters = kNoPart;
  int64_t drawn = kNoPart;
  int64_t sink_parts = kNoPart;
  int64_t scaled_dout = kNoPart;
  int64_t dq_queue = kNoPart;
  int64_t row_sequence = kNoPart;
  int64_t key_sequence = kNoPart;
  int64_t records = kNoPart;
  int64_t totals = kNoPart;
  int64_t pairs = kNoPart;
  int64_t bytes = 0;
};

// dtype, variant, accumulate and `entry` select the kernel of an instance, which is of the head dims.
struct FwdPlan {
  char const* kernel;  // its function, in the family's namespace
  DType dtype;
  Variant variant;
  AccumulateIn accumulate;
  int head_dim;    // the kernel's kHeadDim: the smallest instance that holds the tensor's
  int head_dim_v;  // the kernel's kHeadDimV
  int entry;           // of the architecture's tile table, see Choice
  KernelShape shape;
  int64_t ctas;
  TileOrder order;
  int tile_heads;  // see FwdParams
  int column_parts;  // large head dims: CTAs per row tile, each of which computes so much of out's columns
  TileSplit split;
  bool draws_tiles;
  bool pairs_ctas;    // sm80, large head dims: two CTAs work together on row tiles, see sm80/streaming/pair.cuh
  int64_t row_tiles;  // with it: of all heads; of packed sequences at most
  FwdWorkspace workspace;
  TileMaskPlan mask;
};

struct BwdPlan {
  char const* kernel;     // of dK and dV: its function, in the family's namespace
  char const* dq_kernel;  // of dQ, if that has one of its own
  DType dtype;
  Variant variant;
  int head_dim;    // the kernel's kHeadDim
  int head_dim_v;  // the kernel's kHeadDimV
  int entry;       // of the architecture's tile table, see Choice
  KernelShape shape;
  bool deterministic;
  bool scales_dout;   // see BwdParams::scaled_dout
  // Packed sequences are processed in parts, one launch after the other in the same workspace, where a row tile per
  // short sequence would make it far larger than the tensors. What follows is of a part.
  int parts;
  int sequences_per_part;
  int m_blocks;       // where sequences are read at run time: of all of them, at most
  int n_blocks;
  int64_t row_tiles;  // of all heads
  int64_t key_tiles;
  int64_t ctas;       // of the kernel that computes dK and dV
  int64_t dq_ctas;    // of the kernel that computes dQ, or converts its float32 sums; 0 where there is none
  int key_pairs;      // sm80, large head dims: pairs of CTAs that compute dK and dV together, see
                      // sm80/backward/streamed/pair.cuh; 0: each CTA works alone
  int row_pairs;      // the same of dQ
  LaunchOrder launch_order;
  TaskOrder task_order;
  TileSplit split;
  BwdWorkspace workspace;
  TileMaskPlan mask;
};

}  // namespace flash_cute
