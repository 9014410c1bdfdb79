#ifndef FLASH_CUTE_NO_CUDA

#include "tile_mask.h"

#include "families.h"
#include "masks/params.h"

#include "instances.h"  // which needs what the others declare

namespace flash_cute {
namespace {

using MaskLaunch = cudaError_t (*)(masks::Params const&, int, cudaStream_t);

struct MaskInstance {
  int arch;
  MaskLaunch launch;
};
#define FLASH_CUTE_TILE_MASK_INSTANCE(arch) {arch, &masks::launch<arch>},
constexpr MaskInstance kMaskInstances[] = {FLASH_CUTE_TILE_MASK_INSTANCES(FLASH_CUTE_TILE_MASK_INSTANCE){0, nullptr}};

// That of the newest architecture that runs on the GPU. There is one wherever there is a kernel that reads its lists.
MaskLaunch find_launch(Gpu gpu) {
  MaskInstance best{0, nullptr};
  for (MaskInstance const& instance : kMaskInstances) {
    bool const runs = instance.arch == 90 ? gpu.capability == 90 : gpu.capability >= instance.arch;
    if (instance.launch != nullptr && runs && instance.arch > best.arch) best = instance;
  }
  return best.launch;
}

TileMask tile_mask(TileMaskPlan const& plan, Workspace const& workspace, Problem const& problem) {
  bool const has_bits = problem.mask_matrix;
  int64_t const pairs = int64_t{plan.batches} * plan.heads, columns = plan.columns();
  int64_t const bits = has_bits ? (problem.len_q + kBitRows - 1) / kBitRows * columns : 0;
  int64_t const row_list = int64_t{plan.row_units} * plan.key_words();
  int64_t const key_list = int64_t{plan.key_tiles} * plan.row_words();
  auto const of_head = [&](int64_t size) { return plan.heads > 1 ? size : 0; };
  auto const of_batch = [&](int64_t size) { return plan.batches > 1 ? plan.heads * size : 0; };
  return {.intervals = workspace.part<RowInterval>(plan.intervals),
          .intervals_per_column = has_bits ? 0 : problem.mask_intervals,
          .interval_stride = pairs * columns,
          .batch_stride = of_batch(columns),
          .head_stride = of_head(columns),
          .bits = workspace.part<RowBits>(plan.bits),
          .bits_block_stride = columns,
          .bits_batch_stride = of_batch(bits),
          .bits_head_stride = of_head(bits),
          .of_rows = {.visited = workspace.part<uint32_t>(plan.rows_visited),
                      .whole = workspace.part<uint32_t>(plan.rows_whole),
                      .words = plan.key_words(),
                      .lists = plan.row_units},
          .of_keys = {.visited = workspace.part<uint32_t>(plan.keys_visited),
                      .whole = workspace.part<uint32_t>(plan.keys_whole),
                      .words = plan.row_words(),
                      .lists = plan.key_tiles},
          .row_list_batch_stride = of_batch(row_list),
          .row_list_head_stride = of_head(row_list),
          .key_list_batch_stride = of_batch(key_list),
          .key_list_head_stride = of_head(key_list),
          .row_order = workspace.part<int>(plan.row_order),
          .row_order_batch_stride = plan.tile_units > 0 ? of_batch(plan.row_tiles()) : 0,
          .row_order_head_stride = plan.tile_units > 0 ? of_head(plan.row_tiles()) : 0};
}

}  // namespace

TileMask launch_tile_mask(TileMaskPlan const& plan, FwdArgs const& args, Problem const& problem,
                          VarlenArgs const* lengths, Workspace const& workspace, Gpu gpu, cudaStream_t stream,
                          void* counters, int64_t zeroed) {
  masks::Params const params{.given = make_given_mask(args),
                             .band = problem.band,
                             .sequences = make_sequences(args, problem, lengths),
                             .sequence_count = problem.batch,
                             .len_q = problem.len_q,
                             .len_k = problem.len_k,
                             .plan = plan,
                             .intervals = workspace.part<RowInterval>(plan.intervals),
                             .bits = workspace.part<RowBits>(plan.bits),
                             .tile_rows = workspace.part<TileRows>(plan.tile_rows),
                             .rows_visited = workspace.part<uint32_t>(plan.rows_visited),
                             .rows_whole = workspace.part<uint32_t>(plan.rows_whole),
                             .keys_visited = workspace.part<uint32_t>(plan.keys_visited),
                             .keys_whole = workspace.part<uint32_t>(plan.keys_whole),
                             .row_order = workspace.part<int>(plan.row_order),
                             .zeroed = static_cast<int*>(counters),
                             .zeroed_words = static_cast<int>(zeroed / 4)};
  check_cuda(find_launch(gpu)(params, gpu.num_sms, stream), "launch the kernels that read the mask");
  return tile_mask(plan, workspace, problem);
}

}  // namespace flash_cute

#endif  // FLASH_CUTE_NO_CUDA
