// A call that has passed the checks, the GPU that it runs on, and what may be asked of the plan. Plain data: no torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "contract/accumulate.h"
#include "contract/kernel_shape.h"
#include "contract/params.h"

namespace flash_cute {

enum class Causal { kNone, kTopLeft, kBottomRight };
enum class Backend { kAuto, kCpu, kSm80, kSm90 };

constexpr char const* backend_name(Backend backend) {
  constexpr char const* kNames[] = {"auto", "cpu", "sm80", "sm90"};
  return kNames[static_cast<int>(backend)];
}

// The properties of a GPU on which a plan depends.
struct Gpu {
  int capability;  // 80, 90, ...
  int num_sms;
};

// Which kernel runs: what a caller or a tuning asks for, where -1 leaves it to the plan; and what the plan has chosen.
struct Choice {
  Backend backend = Backend::kAuto;
  int entry = -1;  // row of the family's tile table, see sm90/forward/rows/tile.h; of sm80 the chip, sm80/common/chip.h
  int split = -1;  // 0: split no tile, 1: split those of the last wave wherever that is possible
  int num_sms = 0;  // over a cache: how many multiprocessors the plan counts with; 0: all that there are

  constexpr bool is_open() const { return backend == Backend::kAuto && entry < 0 && split < 0; }
};

// The input of the plan. Of a packed call batch is the number of sequences, len_q and len_k are the rows and keys of
// all of them.
struct Problem {
  int batch;
  int heads_q;
  int heads_kv;
  int len_q;
  int len_k;
  int head_dim;
  int head_dim_v;  // of v and out
  bool packed;
  bool bfloat16;         // else float16; of no meaning with fp8
  bool fp8;              // q, k and v, each of them of either type
  bool all_e4m3;         // with fp8: all three are float8_e4m3fn
  double scale;
  double softcap;        // 0: none
  bool has_sinks;
  bool has_alibi;
  bool alibi_per_batch;  // slopes of (batch, heads_q), else (heads_q,)
  Causal causal;
  Band band;      // causal and the window; exact for lengths up to kMaxLength. Packed: see make_band
  // A mask, see contract/tile_mask.h.
  int mask_intervals = 0;    // of a column; 0: there is no mask
  bool mask_matrix = false;  // it has a matrix or blocks too: kernels read bits of it, and no intervals
  bool mask_blocks = false;  // it has blocks
  int mask_batches = 1;      // the call's or 1
  int mask_heads = 1;        // heads_kv or 1
  Choice asked = {};
  AccumulateIn accumulate = AccumulateIn::kFloat32;
  bool row_invariant = false;  // of a forward: see sm90/decode/key_chunks/tile.h
  // Of packed sequences, as far as the hints tell: for the choice of a kernel and of its schedule alone.
  bool equal_lengths = false;
  int longest_q = 0;
  int longest_k = 0;
  // Of a backward. Of a dense one len_q are the rows that see a key.
  int lse_rows = 0;  // of the LSE, per head
  bool deterministic = false;
  bool has_dlse = false;  // a gradient reaches the LSE

  // Elements of q, k and v in 16 bytes. The kernel's rows of the head dim are whole vectors of so many.
  int vector() const { return fp8 ? 16 : 8; }
  int padded_to_vectors(int dim) const { return (dim + vector() - 1) / vector() * vector(); }
  int padded_head_dim() const { return padded_to_vectors(head_dim); }
  int padded_head_dim_v() const { return padded_to_vectors(head_dim_v); }

  // Whether some row may not see some key.
  bool is_masked() const { return has_mask() || band.has_lower() || band.has_upper(); }

  // Whether a gradient of the LSE reaches rows with sinks, see BwdParams::scaled_dout.
  bool has_sinks_and_dlse() const { return has_sinks && has_dlse; }

  bool has_mask() const { return mask_intervals > 0; }

  // Whether a score is more than scale * q.k.
  bool modifies_scores() const { return softcap > 0 || has_alibi; }
};

// A call as its kernels see it: with a mask, whose TileMask has band and sequences, a dense batch without a band.
inline Problem seen_by_kernels(Problem problem) {
  if (!problem.has_mask()) return problem;
  if (problem.packed) problem.batch = 1;
  problem.packed = false;
  problem.band = {.lower = -kNoLimit, .upper = kNoLimit};
  return problem;
}

}  // namespace flash_cute
