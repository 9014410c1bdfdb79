// Stores a part of a gradient, through shared memory in 16-byte vectors.
#pragma once

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "sm80/streaming/pipeline.cuh"
#include "sm80/streaming/products.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::backward::streamed {

// `buffers`: address of kColumns / 64 tiles of 64 x 64 elements, which may be in use until the barrier in here.
template <class Traits, class Out>
CUTE_DEVICE void epilogue(BwdParams const& params, typename Traits::Storage const& smem, uint32_t buffers,
                          Out& out,  // (4, 4, kOutBlocks)
                          int thread) {
  auto const& task = smem.task;
  float const scale = task.needs_dp() ? params.scale : 1.f;  // dQ and dK have it, dV has not
  auto cOut = make_identity_tensor(Shape<Int<kTileRows>, Int<streaming::kColumns>>{});
  auto const tOcO = rowcol_view(typename Traits::OutMma{}.get_slice(thread).partition_C(cOut));  // -> (row, column)
  auto acc = rowcol_view(out);  // (rows, columns)
  CUTE_UNROLL
  for (int i = 0; i < size<0>(acc); ++i) {
    // The gradients of rows that are not used are 0, even if the sequence has a NaN.
    bool const used = get<0>(tOcO(i, _0{})) < task.left[0].rows;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(acc); ++j) acc(i, j) = used ? acc(i, j) * scale : 0.f;
  }
  auto rOut = make_tensor_like<typename Traits::Element>(out);  // (4, 4, kOutBlocks)
  convert(out, rOut);
  cp_async_wait<0>();  // nothing is in flight into the buffers
  __syncthreads();     // and all threads have finished reading them
  streaming::store_out(rOut, buffers, thread);
  __syncthreads();  // all threads have written the gradient
  streaming::write_rows(task.gradient, task.gradient_stride, buffers, task.gradient_rows, task.x.columns, thread);
}

}  // namespace flash_cute::sm80::backward::streamed
