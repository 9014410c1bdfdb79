// The operator of the schedules, in a library of its own: compiled with FLASH_CUTE_SCHEDULES=1 or on first use.
//
//   fwd   attention by the kernel of a schedule, by its name in tile.h. No autograd; v has q's head dim.
//
// Mask and scale are those of flash_cute::fwd, see api/ops.cpp.
#include <torch/csrc/stable/library.h>

#include <iterator>

#include "api/operand.h"
#include "api/plan_json.h"
#include "api/stack.h"
#include "schedules.h"

namespace flash_cute {
namespace {

using studies::schedules::kHeadDims;
using studies::schedules::kNumSchedules;
using studies::schedules::kScheduleNames;
using studies::schedules::Schedule;

using Launch = cudaError_t (*)(DType, int64_t, FwdParams const&, cudaStream_t);

template <int kSchedule, int kHeadDim>
constexpr Launch launch_or_null() {
  if constexpr (kHeadDim <= studies::schedules::max_head_dim(Schedule(kSchedule))) {
    return &studies::schedules::launch<Schedule(kSchedule), kHeadDim>;
  } else {
    return nullptr;
  }
}

// The instances of a schedule, one per entry of kHeadDims.
struct Instances {
  Launch launches[std::size(kHeadDims)];
};

template <int kSchedule, size_t... kIndex>
constexpr Instances instances(std::index_sequence<kIndex...>) {
  return {{launch_or_null<kSchedule, kHeadDims[kIndex]>()...}};
}

template <int... kSchedules>
constexpr std::array<Instances, kNumSchedules> all_instances(std::integer_sequence<int, kSchedules...>) {
  return {instances<kSchedules>(std::make_index_sequence<std::size(kHeadDims)>{})...};
}

constexpr std::array<Instances, kNumSchedules> kInstances =
    all_instances(std::make_integer_sequence<int, kNumSchedules>{});

Schedule parse_schedule(std::string_view name) {
  std::string known;
  for (int i = 0; i < kNumSchedules; ++i) {
    if (name == kScheduleNames[i]) return Schedule(i);
    known += std::string(i == 0 ? "'" : ", '") + kScheduleNames[i] + "'";
  }
  fail("schedule: expected one of ", known, ", got '", name, "'");
}

// The smallest instance that holds the head dim, as an index of kHeadDims.
int find_instance(Schedule schedule, int head_dim) {
  int const most = studies::schedules::max_head_dim(schedule);
  FLASH_CUTE_CHECK(head_dim <= most, "q: expected a head dim of at most ", most, " for the schedule '",
                   kScheduleNames[schedule], "', got ", head_dim);
  auto const holds = [&](int held) { return held >= head_dim; };
  return static_cast<int>(std::find_if(std::begin(kHeadDims), std::end(kHeadDims), holds) - kHeadDims);
}

// What check_fwd leaves to the kernels: their dtypes, and that 32-bit arithmetic on rows and keys does not overflow.
void check_kernel_rules(FwdArgs const& args, Problem const& problem) {
  FLASH_CUTE_CHECK(is_cuda(args.q), "q: expected a CUDA tensor, got ", device_name(args.q));
  check_dtype(args, /*on_cuda=*/true);
  FLASH_CUTE_CHECK(problem.head_dim_v == problem.head_dim, "v: expected q's head dim ", problem.head_dim, ", got ",
                   problem.head_dim_v);
  FLASH_CUTE_CHECK(std::max(problem.len_q, problem.len_k) <= kMaxLength, "q, k: expected at most 10^9 rows, got ",
                   std::max(problem.len_q, problem.len_k));
  FLASH_CUTE_CHECK(std::isnormal(static_cast<float>(problem.scale)) &&
                       std::isfinite(static_cast<float>(problem.scale * kLog2E)),
                   "scale: expected a number that float32 holds, also times log2(e), got ", problem.scale);
}

struct Outputs {
  Tensor out;  // laid out like empty_like(q)
  Tensor lse;  // (batch, heads_q, len_q), float32
};

Outputs allocate(TensorInfo const& q) {
  std::array<int64_t, 3> const lse_sizes{q.sizes[0], q.sizes[1], q.sizes[2]};
  return {.out = empty_like(q),
          .lse = empty_strided(lse_sizes, contiguous_strides(lse_sizes), aoti_torch_dtype_float32(), q)};
}

void launch_schedule(FwdArgs const& args, Problem const& problem, Schedule schedule, int instance, Outputs const& to) {
  TensorInfo const result = tensor_info("out", to.out.get());
  int const padded = (problem.head_dim + 7) / 8 * 8, head_dim = kHeadDims[instance];
  Operand const q(args.q, read_copy(args.q), padded);
  Operand const k(args.k, read_copy(args.k), padded);
  Operand const v(args.v, read_copy(args.v), padded);
  Result const out(result, read_copy(result), padded);
  FwdParams params{};
  params.q = q.data;
  params.k = k.data;
  params.v = v.data;
  params.out = out.data;
  params.lse = static_cast<float*>(mutable_data_pointer(to.lse.get()));
  params.q_strides = q.strides;
  params.k_strides = k.strides;
  params.v_strides = v.strides;
  params.out_strides = out.strides;
  params.batch = problem.batch;
  params.heads_q = problem.heads_q;
  params.heads_kv = problem.heads_kv;
  params.len_q = problem.len_q;
  params.len_k = problem.len_k;
  params.head_dim = params.head_dim_v = padded;
  params.band = problem.band;
  params.scale_log2 = static_cast<float>(problem.scale * kLog2E);
  params.power_scale = power_of_two_from(params.scale_log2);
  bool const masked = problem.band.has_lower() || problem.band.has_upper();
  params.order = sm80::forward::tile_order(studies::schedules::kernel_shape(schedule, head_dim), masked, problem.batch,
                                       problem.heads_q, problem.heads_kv, problem.len_q, problem.len_k, padded);
  int64_t const row_tiles = params.order.num_tiles();
  FLASH_CUTE_CHECK(row_tiles * studies::schedules::column_parts(schedule, head_dim) <= INT_MAX,
                   "q: expected fewer than 2^31 tiles of rows, got ", row_tiles);
  DType const dtype = args.q.dtype == aoti_torch_dtype_float16() ? DType::kFloat16 : DType::kBFloat16;
  Launch const launch = kInstances[schedule].launches[instance];
  check_cuda(launch(dtype, row_tiles, params, current_stream(args.q.device_index)), "launch the schedule");
  out.finish();
}

Outputs fwd(FwdArgs const& args, std::string_view name) {
  Problem const problem = check_fwd(args, /*on_cuda=*/false);
  check_kernel_rules(args, problem);
  Schedule const schedule = parse_schedule(name);
  int const instance = find_instance(schedule, problem.head_dim);
  int const capability = device_gpu(args.q.device_index).capability;
  FLASH_CUTE_CHECK(capability >= 80, "q: expected a GPU of compute capability 8.0 (Ampere) or newer, got ",
                   capability_text(capability));
  CurrentDevice const device(args.q.device_index);
  Outputs outputs = allocate(args.q);
  if (int64_t{problem.batch} * problem.heads_q * problem.len_q > 0) {
    launch_schedule(args, problem, schedule, instance, outputs);
  }
  return outputs;
}

void boxed_fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  Tensor const q = reader.tensor(), k = reader.tensor(), v = reader.tensor();
  String const causal = reader.string();
  auto const window_left = reader.value<std::optional<int64_t>>();
  auto const window_right = reader.value<std::optional<int64_t>>();
  auto const scale = reader.value<std::optional<double>>();
  String const schedule = reader.string();
  FwdArgs const args{.q = tensor_info("q", q.get()),
                     .k = tensor_info("k", k.get()),
                     .v = tensor_info("v", v.get()),
                     .causal = view(causal),
                     .window_left = window_left,
                     .window_right = window_right,
                     .softcap = std::nullopt,
                     .sinks = std::nullopt,
                     .alibi_slopes = std::nullopt,
                     .scale = scale,
                     .backend = "auto",
                     .sequences = std::nullopt};
  Outputs outputs = fwd(args, view(schedule));
  stack[0] = stable::from(outputs.out.release());
  stack[1] = stable::from(outputs.lse.release());
}

}  // namespace
}  // namespace flash_cute

STABLE_TORCH_LIBRARY(flash_cute_schedules, m) {
  m.def(
      "fwd(Tensor q, Tensor k, Tensor v, str causal, int? window_left, int? window_right, float? scale, "
      "str schedule) -> (Tensor out, Tensor lse)");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute_schedules, CUDA, m) { m.impl("fwd", &flash_cute::boxed_fwd); }
