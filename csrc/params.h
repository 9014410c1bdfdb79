// What a kernel is given: plain data, valid on host and device. No torch, no CuTe.
#pragma once

#include <cstdint>

#include "core/tile_split.h"

namespace flash_cute {

// Element strides of one (batch, head, row, column) tensor; the column stride is 1.
struct Strides {
  int64_t batch;
  int64_t head;
  int64_t row;
};

// Which keys a row sees: row i those with i + lower <= j <= i + upper and 0 <= j < len_k. Causal masks and windows are
// values of it. lower <= upper, both in [-kNoLimit, kNoLimit]; a side that stands at its own end of that range has no
// limit, since lengths are at most kNoLimit on CUDA.
struct Band {
  int lower;
  int upper;
};
constexpr int kNoLimit = 1 << 30;

struct FwdParams {
  void const* q;  // (batch, heads_q,  len_q, head_dim), 16-bit elements
  void const* k;  // (batch, heads_kv, len_k, head_dim)
  void const* v;  // (batch, heads_kv, len_k, head_dim)
  void* out;      // (batch, heads_q,  len_q, head_dim)
  float* lse;     // (batch, heads_q,  len_q), contiguous, natural log of the scaled scores

  // Workspace, undefined when the launch begins.
  int* tile_counter;  // one int: CTAs draw tiles from it; null: tiles are dealt in turn
  float* parts;       // of split tiles, see sm90/fwd_split.cuh
  int* part_flags;    // one a warp of each range: its part is in memory
  TileSplit split;

  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides out_strides;

  int batch;
  int heads_q;
  int heads_kv;  // divides heads_q; query head h reads key head h / (heads_q / heads_kv)
  int len_q;     // > 0
  int len_k;     // may be 0
  int head_dim;  // a multiple of 8, at most the kernel's kHeadDim

  // Causal only: row i sees columns j <= i + diagonal.
  // bottom_right: len_k - len_q; top_left: 0.
  int diagonal;

  float scale_log2;  // what multiplies q.k, times log2(e); finite and > 0
};

struct BwdParams {
  void const* q;     // (batch, heads_q,  len_q, head_dim), 16-bit elements
  void const* k;     // (batch, heads_kv, len_k, head_dim)
  void const* v;     // (batch, heads_kv, len_k, head_dim)
  void const* out;   // (batch, heads_q,  len_q, head_dim), the forward's
  void const* dout;  // (batch, heads_q,  len_q, head_dim)
  float const* lse;   // (batch, heads_q, len_q), contiguous, the forward's
  float const* dlse;  // (batch, heads_q, len_q), contiguous; null: no gradient reaches the LSE
  void* dq;  // (batch, heads_q,  len_q, head_dim)
  void* dk;  // (batch, heads_kv, len_k, head_dim)
  void* dv;  // (batch, heads_kv, len_k, head_dim)

  // Workspace, see BwdWorkspace. Undefined when the launch begins; the first kernel writes what is read.
  float* dq_acc;    // sums of dQ / scale, in an order of the architecture's own; null where registers hold them. On sm90
                    // parts of split key tiles take the place of those that have been used
  float* lse_log2;  // (batch, heads_q, rows padded to whole row tiles): lse * log2(e); +inf for padding and for
                    // rows that see no key, so that their P is 0
  float* delta;     // the same shape: rowsum(dO * O) - dLSE; 0 for padding and for rows that see no key
  int* semaphores;  // (batch, heads_q, row tiles): the turns ended at dq_acc, and then the parts that are there, see
                    // <arch>/bwd_dq.cuh; null without it
  int* counters;    // [0]: the tasks that CTAs have begun; [1 + h]: what has been done of key head h, of all batches,
                    // see <arch>/bwd_dq.cuh; null without dq_acc
  TileSplit split;  // of key tiles, by rows

  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides out_strides;
  Strides dout_strides;
  Strides dq_strides;
  Strides dk_strides;
  Strides dv_strides;

  int batch;
  int heads_q;
  int heads_kv;  // divides heads_q
  int len_q;     // > 0
  int len_k;     // > 0
  int head_dim;  // a multiple of 8, at most the kernel's kHeadDim
  int diagonal;  // as in FwdParams

  float scale;
  float scale_log2;
  bool deterministic;  // the key tiles add to dq_acc in one order
};

}  // namespace flash_cute
