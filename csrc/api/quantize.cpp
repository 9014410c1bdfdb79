// Quantisation to float8: check, allocate, launch.
#include "quantize.h"

#include <climits>

#include "checks.h"
#include "quantize/params.h"

namespace flash_cute {
namespace {

using quantize::kBlockRows;
using quantize::kHeadDimUnit;
using quantize::kMaxHeadDim;
using quantize::Per;

Per parse_per(std::string_view per) {
  if (per == "head") return Per::kHead;
  if (per == "block") return Per::kBlock;
  if (per == "channel") return Per::kChannel;
  fail("per: expected 'head', 'block' or 'channel', got '", per, "'");
}

bool parse_is_e5m2(std::string_view dtype) {
  FLASH_CUTE_CHECK(dtype == "float8_e4m3fn" || dtype == "float8_e5m2",
                   "dtype: expected float8_e4m3fn or float8_e5m2, got ", dtype);
  return dtype == "float8_e5m2";
}

int64_t batch_of(QuantizeArgs const& args) {
  return args.cu_seqlens ? args.cu_seqlens->sizes[0] - 1 : args.x.sizes[0];
}

static_assert(kBlockRows == Fp8Terms::kBlock);

// The most blocks that there can be, in all heads.
int64_t task_limit(QuantizeArgs const& args) {
  int64_t const heads = args.x.sizes[1], rows = args.x.sizes[2];
  if (!args.cu_seqlens) return args.x.sizes[0] * heads * blocks_of(rows);
  return (rows / kBlockRows + batch_of(args) + 2) * heads;
}

void check_sequences(QuantizeArgs const& args) {
  FLASH_CUTE_CHECK(!args.max_seqlen || args.cu_seqlens, "max_seqlen: expected None without cu_seqlens, got ",
                   *args.max_seqlen);
  if (!args.cu_seqlens) return;
  TensorInfo const& offsets = *args.cu_seqlens;
  check_same_device(args.x, offsets);
  FLASH_CUTE_CHECK(offsets.dtype == aoti_torch_dtype_int32(), offsets.name, ": expected int32, got ",
                   dtype_name(offsets.dtype));
  FLASH_CUTE_CHECK(offsets.rank == 1 && offsets.sizes[0] >= 1, offsets.name,
                   ": expected the shape (sequences + 1,), got ", shape_text(offsets));
  FLASH_CUTE_CHECK(offsets.sizes[0] - 1 <= kMaxLength, offsets.name, ": expected at most 10^9 sequences, got ",
                   offsets.sizes[0] - 1);
  FLASH_CUTE_CHECK(offsets.sizes[0] == 1 || offsets.strides[0] == 1, offsets.name,
                   ": expected a contiguous tensor, got a stride of ", offsets.strides[0]);
  FLASH_CUTE_CHECK(!args.max_seqlen || (*args.max_seqlen >= 0 && *args.max_seqlen <= kMaxLength),
                   "max_seqlen: expected None or a number of rows from 0 to 10^9, got ", *args.max_seqlen);
}

void check_tensor(QuantizeArgs const& args) {
  TensorInfo const& x = args.x;
  bool const packed = args.cu_seqlens.has_value();
  FLASH_CUTE_CHECK(x.rank == 4 && x.packed == packed, x.name, ": expected ",
                   packed ? "3 dims (rows, heads, head_dim)" : "4 dims (batch, heads, length, head_dim)", ", got ",
                   shape_text(x));
  FLASH_CUTE_CHECK(x.dtype == aoti_torch_dtype_float16() || x.dtype == aoti_torch_dtype_bfloat16() ||
                       x.dtype == aoti_torch_dtype_float32(),
                   x.name, ": expected float16, bfloat16 or float32, got ", dtype_name(x.dtype));
  FLASH_CUTE_CHECK(x.sizes[3] > 0 && x.sizes[3] % kHeadDimUnit == 0 && x.sizes[3] <= kMaxHeadDim, x.name,
                   ": expected a head dim that is a multiple of ", kHeadDimUnit, " and at most ", kMaxHeadDim,
                   ", got ", x.sizes[3]);
  FLASH_CUTE_CHECK(x.sizes[2] <= kMaxLength, x.name, ": expected at most 10^9 rows, got ", x.sizes[2]);
  FLASH_CUTE_CHECK(x.sizes[0] <= INT_MAX && x.sizes[1] <= INT_MAX && task_limit(args) <= 1 << 30, x.name,
                   ": expected at most 2^30 blocks of ", kBlockRows, " rows in all heads, got ", shape_text(x));
}

void check_key_mean(QuantizeArgs const& args) {
  TensorInfo const& mean = *args.key_mean;
  check_same_device(args.x, mean);
  FLASH_CUTE_CHECK(mean.dtype == aoti_torch_dtype_float32(), "key_mean: expected float32, got ",
                   dtype_name(mean.dtype));
  std::array<int64_t, 3> const sizes{batch_of(args), args.heads_kv, args.x.sizes[3]};
  FLASH_CUTE_CHECK(mean.rank == 3 && std::equal(sizes.begin(), sizes.end(), mean.sizes),
                   "key_mean: expected the shape ", shape_text(sizes.data(), 3), ", got ", shape_text(mean));
  std::array<int64_t, 3> const strides = contiguous_strides(sizes);
  for (int dim = 0; dim < 3; ++dim) {
    FLASH_CUTE_CHECK(sizes[dim] <= 1 || mean.strides[dim] == strides[dim],
                     "key_mean: expected a contiguous tensor, got a stride of ", mean.strides[dim]);
  }
}

}  // namespace

void check_quantize(QuantizeArgs const& args) {
  check_sequences(args);
  check_tensor(args);
  parse_is_e5m2(args.dtype);
  Per const per = parse_per(args.per);
  int64_t const heads = args.x.sizes[1];
  FLASH_CUTE_CHECK(args.heads_kv > 0 ? heads % args.heads_kv == 0 : args.heads_kv == 0 && heads == 0, args.x.name,
                   ": expected a number of heads that is a multiple of k's ", args.heads_kv, ", got ", heads);
  bool const is_plain = !args.center && !args.seed && !args.key_mean;
  FLASH_CUTE_CHECK(per != Per::kChannel || is_plain,
                   "per: expected 'head' or 'block' with a mean or a rotation, got 'channel'");
  FLASH_CUTE_CHECK(!args.center || (args.heads_kv == heads && !args.key_mean),
                   "center: expected False for heads in groups, and with key_mean, got True");
  if (args.key_mean) check_key_mean(args);
}

}  // namespace flash_cute

#ifdef FLASH_CUTE_NO_CUDA

namespace flash_cute {

QuantizeResult quantize_cuda(QuantizeArgs const&) {
  throw std::runtime_error("flash_cute: this build has no CUDA kernels (it was built with FLASH_CUTE_NO_CUDA)");
}

}  // namespace flash_cute

#else

#include "kernel_args.h"
#include "planning/workspace.h"

#include "instances.h"  // which needs what the others declare

namespace flash_cute {
namespace {

using quantize::Input;
using quantize::Params;

using Launch = cudaError_t (*)(Params const&, int, cudaStream_t);

// Of this build, for the GPU.
Launch find_launch(Gpu gpu, TensorInfo const& x) {
  Launch found = nullptr;
#define FLASH_CUTE_FIND(arch) \
  if (arch == 90 ? gpu.capability == 90 : gpu.capability >= 80) found = &quantize::launch<arch>;
  FLASH_CUTE_QUANTIZE_FP8_INSTANCES(FLASH_CUTE_FIND)
#undef FLASH_CUTE_FIND
  FLASH_CUTE_CHECK(found != nullptr, x.name, ": expected a GPU that this build has kernels for, got one of capability ",
                   gpu.capability);
  return found;
}

// The generator is splitmix64; flash_cute/quantize.py has the same.
quantize::Signs make_signs(int64_t seed) {
  quantize::Signs signs;
  uint64_t state = static_cast<uint64_t>(seed);
  for (int i = 0; i < kMaxHeadDim / 32; i += 2) {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    z ^= z >> 31;
    signs.words[i] = static_cast<uint32_t>(z);
    signs.words[i + 1] = static_cast<uint32_t>(z >> 32);
  }
  return signs;
}

Tensor empty_float(bool is_there, std::array<int64_t, 3> const& sizes, TensorInfo const& like) {
  if (!is_there) return empty_strided<1>({0}, {1}, aoti_torch_dtype_float32(), like);
  return empty_strided(sizes, contiguous_strides(sizes), aoti_torch_dtype_float32(), like);
}

Tensor empty_descale(QuantizeArgs const& args, Per per, int64_t blocks) {
  int64_t const batch = batch_of(args);
  if (per == Per::kBlock) return empty_float(true, {batch, args.x.sizes[1], blocks}, args.x);
  if (per == Per::kChannel) return empty_float(true, {batch, args.heads_kv, args.x.sizes[3]}, args.x);
  std::array<int64_t, 2> const sizes{batch, args.heads_kv};
  return empty_strided(sizes, contiguous_strides(sizes), aoti_torch_dtype_float32(), args.x);
}

// Like x if its rows are contiguous, else contiguous. `strides`: of the dims of a dense tensor.
Tensor empty_out(TensorInfo const& x, bool is_e5m2, Strides& strides) {
  Sizes const sizes{x.sizes[0], x.sizes[1], x.sizes[2], x.sizes[3]};
  Sizes const made = x.strides[3] == 1 ? empty_like_strides(x) : packed_strides(own_dims(x), sizes);
  strides = kernel_strides(sizes.data(), made.data());
  int32_t const dtype = is_e5m2 ? aoti_torch_dtype_float8_e5m2() : aoti_torch_dtype_float8_e4m3fn();
  if (!x.packed) return empty_strided(sizes, made, dtype, x);
  return empty_strided<3>({sizes[2], sizes[1], sizes[3]}, {made[2], made[1], made[3]}, dtype, x);
}

// Where the parts of the workspace are.
struct Layout {
  int64_t ticket, arrived, amax, zeroed, partials, sequences, bytes;

  Layout(Params const& params, bool packed) {
    int64_t const groups = (params.batch + (packed ? 2 : 0)) * int64_t{params.heads_kv};
    int64_t const kWord = sizeof(unsigned);
    WorkspaceLayout layout;
    ticket = layout.take(kWord);
    arrived = layout.take(kWord * groups);
    amax = layout.take(kWord * groups * params.amax_width);
    zeroed = layout.bytes();
    partials = layout.take(params.centers ? kWord * params.task_limit * params.head_dim : 0);
    sequences = packed ? layout.take(kWord * quantize::sequence_numbers(params.batch)) : kNoPart;
    bytes = layout.bytes();
  }
};

Input input_of(int32_t dtype) {
  return dtype == aoti_torch_dtype_float16()    ? Input::kFloat16
         : dtype == aoti_torch_dtype_bfloat16() ? Input::kBFloat16
                                                : Input::kFloat32;
}

}  // namespace

QuantizeResult quantize_cuda(QuantizeArgs const& args) {
  check_quantize(args);
  TensorInfo const& x = args.x;
  FLASH_CUTE_CHECK(is_cuda(x), x.name, ": expected a CUDA tensor, got ", device_name(x));
  Gpu const gpu = device_gpu(x.device_index);
  Launch const launch = find_launch(gpu, x);
  bool const packed = args.cu_seqlens.has_value();
  Per const per = parse_per(args.per);
  int64_t const batch = batch_of(args), heads = x.sizes[1], rows = x.sizes[2], head_dim = x.sizes[3];
  int64_t const blocks = blocks_of(args.max_seqlen.value_or(rows));
  bool const is_e5m2 = parse_is_e5m2(args.dtype);

  CurrentDevice const device(x.device_index);
  Strides out_strides;
  QuantizeResult result{.out = empty_out(x, is_e5m2, out_strides),
                        .descale = empty_descale(args, per, blocks),
                        .mean = empty_float(args.center, {batch, args.heads_kv, head_dim}, x),
                        .shift = packed && args.key_mean
                                     ? empty_strided<2>({heads, rows}, {rows, 1}, aoti_torch_dtype_float32(), x)
                                     : empty_float(args.key_mean.has_value(), {batch, heads, rows}, x)};
  if (heads == 0 || (batch == 0 && (rows == 0 || !packed))) return result;
  if (args.key_mean) {
    uintptr_t const address = reinterpret_cast<uintptr_t>(data_pointer(args.key_mean->handle));
    FLASH_CUTE_CHECK(address % 16 == 0, "key_mean: expected an address that is a multiple of 16, got ", address);
  }

  Operand const operand(x, read_copy(x, /*vector=*/8), static_cast<int>(head_dim));
  auto const floats = [](Tensor const& tensor) { return static_cast<float*>(mutable_data_pointer(tensor.get())); };
  Params params{.x = operand.data,
                .out = static_cast<uint8_t*>(mutable_data_pointer(result.out.get())),
                .descale = floats(result.descale),
                .mean = args.center ? floats(result.mean) : nullptr,
                .key_mean = args.key_mean ? static_cast<float const*>(data_pointer(args.key_mean->handle)) : nullptr,
                .shift = args.key_mean ? floats(result.shift) : nullptr,
                .strides = operand.strides,
                .out_strides = out_strides,
                .shift_strides = {.batch = heads * rows, .head = rows, .row = 1},
                .batch = static_cast<int>(batch),
                .heads = static_cast<int>(heads),
                .heads_kv = static_cast<int>(args.heads_kv),
                .rows = static_cast<int>(rows),
                .head_dim = static_cast<int>(head_dim),
                .blocks = static_cast<int>(blocks_of(rows)),
                .descale_blocks = static_cast<int>(blocks),
                .task_limit = static_cast<int>(task_limit(args)),
                .input = input_of(x.dtype),
                .per = per,
                .is_e5m2 = is_e5m2,
                .centers = args.center,
                .has_statistics = args.center || per != Per::kBlock,
                .amax_width = quantize::amax_width_of(per, args.center, static_cast<int>(head_dim))};
  if (args.seed) {
    params.hadamard = static_cast<int>(head_dim & -head_dim);  // the largest power of two that divides it
    params.hadamard_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(params.hadamard)));
    params.signs = make_signs(*args.seed);
  }
  if (packed) params.cu_seqlens = static_cast<int const*>(data_pointer(args.cu_seqlens->handle));

  Layout const layout(params, packed);
  Workspace const workspace(layout.bytes, x);
  params.ticket = workspace.part<unsigned>(layout.ticket);
  params.arrived = workspace.part<unsigned>(layout.arrived);
  params.amax = workspace.part<unsigned>(layout.amax);
  params.zeroed_bytes = layout.zeroed;
  params.partials = workspace.part<float>(layout.partials);
  params.sequences = workspace.part<int>(layout.sequences);
  check_cuda(launch(params, gpu.num_sms, current_stream(x.device_index)), "launch the quantisation");
  return result;
}

}  // namespace flash_cute

#endif  // FLASH_CUTE_NO_CUDA
