// The figures of a kernel that a person wants to see, and that the plan computes with. Plain data: no torch, no CuTe.
#pragma once

namespace flash_cute {

struct KernelShape {
  int block_m;      // query rows per CTA of a forward, per mainloop step of a backward
  int block_n;      // keys per mainloop step of a forward, per CTA of a backward
  int threads;      // per CTA
  int stages;       // K/V buffers in shared memory; Q/dO buffers of a backward
  int smem_bytes;   // dynamic shared memory per CTA
  int ctas_per_sm;  // what the register budget was set for
  bool dq_in_registers = false;  // backward: a second kernel sums dQ there, and the workspace has no sums
};

}  // namespace flash_cute
