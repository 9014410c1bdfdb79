// The parameters of a kernel: plain data, valid on host and device. No torch, no CuTe.
#pragma once

#include <bit>
#include <cstdint>

#include "fp8.h"
#include "orders.h"
#include "softcap.h"
#include "tile_mask.h"
#include "tile_order.h"
#include "tile_split.h"

namespace flash_cute {

// The mask: row i sees the columns j with i + lower <= j <= i + upper and 0 <= j < len_k. No mask, a causal mask and
// windows are values of it. lower <= upper, both in [-kNoLimit, kNoLimit]; the ends mean no limit, since lengths on
// CUDA are below kNoLimit.
struct Band {
  int lower;
  int upper;

  constexpr bool has_lower() const { return lower > -kNoLimit; }
  constexpr bool has_upper() const { return upper < kNoLimit; }

  // A narrow window: both sides are limited, to less than half of the side that a tile loops over. Of a row tile that
  // are the keys, and most rows see the same number of them; of a key tile the rows.
  constexpr bool is_window(int length) const {
    return has_lower() && has_upper() && 2 * (int64_t{upper} - lower + 1) < length;
  }

  static constexpr int kNoLimit = 1 << 30;
};
constexpr int kNoLimit = Band::kNoLimit;
constexpr int kLargestHeadDim = 1024;
constexpr int kMaxUnsplitHeadDim = 256;  // above it, the head dim is split: kernels of sm80/forward/streamed and so on;
                                         // the sm90 forward has its own limit, sm90::forward::rows::kMaxHeadDim
constexpr int kMaxLength = 1'000'000'000;  // of rows and keys: row + kNoLimit + the rows of a tile still fits in an int

// The sequences of a batch for the kernels that read them at run time: dense, each with len_q rows and len_k keys, or
// packed one after the other, where `cu_q` and `cu_k` are given. Then the tensors have no batch dimension (stride 0),
// and len_q and len_k of the parameters are the totals.
struct Sequences {
  int const* cu_q;    // (batch + 1): sequence b has the rows [cu_q[b], cu_q[b + 1]); null: dense
  int const* cu_k;    // (batch + 1): its keys
  int const* used_q;  // (batch): only so many of its rows; null: all
  int const* used_k;
  int window_left;    // keys that a row sees before its position; kNoLimit: all
  int window_right;   // behind it
  int* tiles_before;  // sm80, packed: (batch + 3) row tiles of one head in the sequences before, and the floors of
                      // rows and of keys, (batch + 2) each, see core/sequence.cuh; null: few sequences
  bool bottom_right;  // packed: row i has the position i + len_k - len_q of its sequence, else i
  int shift;          // dense: row i has the position i + shift
  bool has_before;    // packed: the call has sequences before these and behind these, which other launches serve, see
  bool has_behind;    // BwdPlan::parts
};

// The terms of a modified score: cap * tanh(scale * q.k / cap) - slope * |position - column|. It is computed in units
// of scale_log2 / log2(e): of the scale, or of the cap where there is one.
struct ScoreTerms {
  float softcap_scale;  // scale / cap; 0: no cap
  SoftcapPolynomial softcap;
  float slope_factor;   // a slope in those units
  float const* slopes;  // (batch, heads_q) or (heads_q); null: none
  int64_t slopes_batch_stride;
  int64_t slopes_head_stride;
};

// A term exp(sink) of each head's denominator.
struct Sinks {
  void const* data;  // (heads_q); null: none
  int64_t stride;
  bool is_float32;  // else of the inputs' type
};

// The least power of two that is not below x, a normal float.
constexpr float power_of_two_from(float x) {
  return std::bit_cast<float>((std::bit_cast<uint32_t>(x) + 0x007fffffu) & 0x7f800000u);
}

// Element strides of one (batch, head, row, column) tensor; the column stride is 1.
struct Strides {
  int64_t batch;
  int64_t head;
  int64_t row;
};

struct FwdParams {
  void const* q;  // (batch, heads_q,  len_q, head_dim), 16-bit elements or float8
  void const* k;  // (batch, heads_kv, len_k, head_dim)
  void const* v;  // (batch, heads_kv, len_k, head_dim_v)
  void* out;      // (batch, heads_q,  len_q, head_dim_v)
  float* lse;     // (batch, heads_q,  len_q), contiguous, natural log of the scaled scores

  // Workspace, see FwdWorkspace. On sm80 only pairs of CTAs have these, see sm80/streaming/pair.cuh.
  int* ticket;      // begins as 0: CTAs draw row tiles from it, or their rank where tiles are split; on
                    // sm80 their place in a pair
  int* part_flags;  // begin as 0: one flag per warp of each range, set when its part is in global memory;
                    // on sm80 the messages that each CTA has sent
  float* parts;     // partial results of split tiles, see sm90/forward/rows/split.cuh; on sm80 the messages

  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides out_strides;

  int batch;
  int heads_q;
  int heads_kv;  // divides heads_q; query head h reads KV head h / (heads_q / heads_kv)
  int len_q;     // > 0
  int len_k;     // may be 0
  int head_dim;  // of q and k: a multiple of 8, with float8 of 16, at most the kernel's kHeadDim
  Band band;
  float scale_log2;  // scale * log2(e), with a softcap cap * log2(e); finite and > 0
  float power_scale;  // the power of two from scale_log2 on, see OnlineSoftmax

  TileOrder order;
  TileSplit split;   // of row tiles, by keys
  bool draws_tiles;  // dynamic schedule, from the ticket; else the tiles are dealt

  int head_dim_v;  // of v and out: the same, at most the kernel's kHeadDimV
  int tile_heads;  // heads of a row tile, see sm90/forward/rows/tile.h; the order counts heads in units of it

  Sinks sinks;
  Sequences sequences;  // read only by the kernels that take sequences at run time
  ScoreTerms score;     // read only by the kernels of modified scores
  Fp8Terms const* fp8;  // on the host, for the launch; null where tensors have 16 bits
  TileMask mask;        // read only by the kernels of variants that read a mask
};

// The tiles of a batch whose sequences the backward reads at run time, listed on the device by a kernel before it.
// Sides are listed for one head; there are `sequence_count` sequences, see core/sequence.cuh.
struct SequenceRecord;
struct SequenceTiles {
  int* row_sequence;  // of each row tile; the tiles of a sequence are side by side
  int* key_sequence;  // of each key tile, whose sequences are in the order of processing
  SequenceRecord* records;  // (sequences), see core/sequence_tiles.cuh
  int* totals;              // (4): the row tiles and the key tiles that there are, and the floors of the next sequence
};
constexpr int kSequenceRecordBytes = 48;

struct BwdParams {
  void const* q;     // (batch, heads_q,  len_q, head_dim), 16-bit elements
  void const* k;     // (batch, heads_kv, len_k, head_dim)
  void const* v;     // (batch, heads_kv, len_k, head_dim_v)
  void const* out;   // (batch, heads_q,  len_q, head_dim_v), the forward's
  void const* dout;  // (batch, heads_q,  len_q, head_dim_v)
  float const* lse;   // (batch, heads_q, lse_rows), contiguous, the forward's, from the first of the len_q rows on
  float const* dlse;  // the same; null: no gradient reaches the LSE
  void* dq;  // (batch, heads_q,  len_q, head_dim)
  void* dk;  // (batch, heads_kv, len_k, head_dim)
  void* dv;  // (batch, heads_kv, len_k, head_dim_v)
  void* dsinks;  // (heads_q), contiguous, in the sinks' type; null without sinks

  // Workspace, see BwdWorkspace. Uninitialised before the launch; the preprocess kernel writes whatever is read.
  float* dq_acc;    // sums of dQ / scale, in the order of the architecture's MMA fragments; null where registers hold
                    // them. On sm90 the parts of split key tiles overwrite sums that have been converted already
  float* lse_log2;  // (batch, heads_q, rows padded to whole row tiles): lse * log2(e), with sinks of the keys and the
                    // sink (less what scales dO in scaled_dout); +inf for padding and for rows that see no key, so that
                    // their P is 0
  float* delta;     // the same shape: rowsum(dO * O) - dLSE; 0 for padding and for rows that see no key
  float* sink_parts;  // with sinks, per row tile: the sum of its rows' gradients of the sink. Those of the parts of a
                      // call follow one another
  void* scaled_dout;  // (batch, heads_q, lse_rows, head_dim_v), contiguous: dO times a power of two per row, see
                      // core/bwd_preprocess.cuh; null where the kernels read dO itself
  int* semaphores;  // (batch, heads_q, row tiles): counts the ordered adds to dq_acc, and on sm90, reused later, the
                    // parts of split tiles in memory; see <arch>/backward/dq_in_memory/dq.cuh; null without dq_acc
  int* counters;    // [0]: the ticket from which CTAs draw tasks; [1 + h]: progress of KV head h (over all batches),
                    // see head_counter in sm90/backward/dq_in_memory/dq.cuh, or the DqQueue; null without dq_acc
  int* dq_queue;    // sm90, sequences read at run time, (2, heads_q, row tiles): see dq_in_memory/dq_queue.cuh
  int* drawn;       // sm80, deterministic, dense: (key tiles) the ticket that each CTA drew; else null

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
  int len_q;     // > 0; of a dense batch without the rows at both ends that see no key
  int len_k;     // > 0
  int lse_rows;  // per head of lse, dlse and scaled_dout
  int part;      // index of the part of the call, see BwdPlan::parts
  int head_dim;  // a multiple of 8, at most the kernel's kHeadDim
  Band band;

  float scale;
  float scale_log2;
  bool deterministic;  // the key tiles add to dq_acc in a fixed order

  int m_blocks;  // row tiles per query head
  int n_blocks;  // key tiles per KV head
  int heads_per_kv;          // query heads per KV head
  LaunchOrder launch_order;  // sm80
  TaskOrder task_order;      // sm90, dq_in_memory
  TileSplit split;           // sm90, dq_in_memory: of key tiles, by rows

  int head_dim_v;  // of v, out, dout and dv: a multiple of 8, at most the kernel's kHeadDim
  Sinks sinks;     // read before the kernels, with whose statistics they need not know of it

  // Read only by the kernels that take sequences at run time, the terms only by those of modified scores. Their row
  // tiles have the number head * m_blocks + the number in `tiles`, where m_blocks and n_blocks are the most that there
  // can be per head, in all sequences.
  Sequences sequences;
  SequenceTiles tiles;
  ScoreTerms score;

  void* pairs;  // workspace: what pairs of CTAs share, see sm80/backward/streamed/pair.h; null without pairs
  TileMask mask;  // read only by the kernels of variants that read a mask
};

}  // namespace flash_cute
