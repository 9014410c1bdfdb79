// Tile and resources of a kernel: what `explain` shows and the plan computes with. Plain data: no torch, no CuTe.
#pragma once

namespace flash_cute {

struct KernelShape {
  int block_m;      // query rows per CTA of a forward, per mainloop step of a backward
  int block_n;      // keys per mainloop step of a forward, per CTA of a backward
  int threads;      // per CTA
  int stages;       // K/V buffers in shared memory; Q/dO buffers of a backward
  int smem_bytes;   // dynamic shared memory per CTA
  int ctas_per_sm;  // the occupancy that the register budget is set for
  bool dq_in_registers = false;  // backward: a second kernel accumulates dQ in registers; no dQ sums in the workspace
};

}  // namespace flash_cute
