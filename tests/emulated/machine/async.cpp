// What is asynchronous: TMA, cp.async and WGMMA; and the CUDA API's functions that launches call.
//
// Past 400 lines: what one of them writes to shared memory another reads, by the same swizzles and the same copies
// under way, and ldmatrix and mma.sync share the products' numbers.
#include <array>
#include <bit>

#include "machine.h"

namespace emu {
namespace {

// Of 16 bytes at an address of shared memory, whose bits from 4 on are XORed with those from 7 on.
uint32_t swizzled(uint32_t address, int bits) { return address ^ (address >> 7 & ((1u << bits) - 1)) << 4; }

// What cuTensorMapEncodeTiled makes of its arguments.
struct TensorMap {
  char* data;
  uint64_t sizes[5];
  uint64_t pitches[5];  // bytes; [0]: of an element
  uint16_t box[5];
  uint8_t rank;
  uint8_t swizzle_bits;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

// Calls `piece(address in shared memory, place in global memory, bytes of it inside of the tensor)` for 16 bytes each.
template <class Piece>
void for_box(TensorMap const& map, int const (&at)[5], uint32_t address, Piece const& piece) {
  int const row_bytes = int(map.box[0] * map.pitches[0]);
  for (int row = 0; row < map.box[1] * map.box[2]; ++row) {
    bool inside = true;
    char* place = map.data;
    for (int dim = 1; dim < map.rank; ++dim) {
      int64_t const index = int64_t{at[dim]} + (dim == 1 ? row % map.box[1] : dim == 2 ? row / map.box[1] : 0);
      inside &= index >= 0 && uint64_t(index) < map.sizes[dim];
      place += uint64_t(index) * map.pitches[dim];
    }
    for (int byte = 0; byte < row_bytes; byte += 16) {
      int64_t const column = int64_t{at[0]} + byte / int(map.pitches[0]);
      int64_t const bytes = (int64_t(map.sizes[0]) - column) * int64_t(map.pitches[0]);
      piece(swizzled(address + uint32_t(row * row_bytes + byte), map.swizzle_bits),
            place + column * int64_t(map.pitches[0]), inside ? std::clamp<int64_t>(bytes, 0, 16) : 0);
    }
  }
}

float decoded(uint16_t bits, bool is_bfloat16) {
  if (is_bfloat16) return std::bit_cast<float>(uint32_t{bits} << 16);
  uint32_t const sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) return std::copysign(float(fraction) * 0x1p-24f, std::bit_cast<float>(sign | 0x3f800000));
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

// The rows [first, first + rows) of an operand, 16 values of k each.
struct Operand {
  uint32_t start, leading, stride;
  int swizzle_bits;
  bool along_rows;

  Operand(uint64_t descriptor, bool along_rows_) : along_rows(along_rows_) {
    start = uint32_t(descriptor & 0x3fff) << 4;
    leading = uint32_t(descriptor >> 16 & 0x3fff) << 4;
    stride = uint32_t(descriptor >> 32 & 0x3fff) << 4;
    static constexpr int kBits[] = {0, 3, 2, 1};
    swizzle_bits = kBits[descriptor >> 62];
  }

  // out[k][row]
  void read(Cta& cta, int first, int rows, bool is_bfloat16, float* out, int pitch) const {
    if (swizzle_bits == 0) fail("wgmma: an operand without a swizzle is not emulated");
    uint32_t const width = 16u << swizzle_bits;
    uint16_t eight[8];
    auto const fetch = [&](uint32_t address) {
      std::memcpy(eight, at_address(cta, swizzled(address, swizzle_bits), 16), 16);
    };
    if (along_rows) {
      for (uint32_t k = 0; k < 16; ++k) {
        for (int row = first; row < first + rows; row += 8) {
          uint32_t const byte = uint32_t(row) * 2;
          fetch(start + k % 8 * width + k / 8 * stride + byte % width + byte / width * leading);
          for (int i = 0; i < 8; ++i) out[int(k) * pitch + row - first + i] = decoded(eight[i], is_bfloat16);
        }
      }
      return;
    }
    for (int row = first; row < first + rows; ++row) {
      for (int half = 0; half < 2; ++half) {
        fetch(start + uint32_t(row % 8) * width + uint32_t(row / 8) * stride + uint32_t(half) * 16);
        for (int i = 0; i < 8; ++i) out[(8 * half + i) * pitch + row - first] = decoded(eight[i], is_bfloat16);
      }
    }
  }
};

// Calls `element(register, row of 16, column)` for a lane's accumulator.
template <class Element>
void for_registers(int n, int lane, Element const& element) {
  for (int i = 0; i < n / 2; ++i) element(i, lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
}

void poison(Cta& cta, uint32_t address) { std::memset(at_address(cta, address, 16), 0xff, 16); }

}  // namespace

void load(uint32_t destination, CUtensorMap const* encoded, int const* coordinates, uint32_t barrier) {
  TensorMap map;
  std::memcpy(&map, encoded, sizeof(map));
  if (destination % 128 != 0) fail("TMA: shared memory that is not aligned");
  Cta& cta = *machine.cta;
  std::array<int, 5> at;
  std::copy_n(coordinates, 5, at.begin());
  int64_t bytes = int64_t(map.pitches[0]) * map.box[0] * map.box[1] * map.box[2];
  auto const box = [=, &cta](auto const& piece) {
    int const(&place)[5] = *reinterpret_cast<int const(*)[5]>(at.data());
    for_box(map, place, destination, piece);
  };
  box([&](uint32_t address, char*, int64_t) { poison(cta, address); });
  auto const copy = [=, &cta] {
    box([&](uint32_t address, char const* from, int64_t inside) {
      char* const to = at_address(cta, address, 16);
      std::memset(to, 0, 16);
      std::memcpy(to, from, size_t(inside));
    });
  };
  machine.copies.push_back({.cta = &cta, .copy = copy, .barrier = &mbarrier_at(barrier), .bytes = bytes});
}

void load_bytes(uint32_t destination, void const* source, uint32_t bytes, uint32_t barrier) {
  if (destination % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0) {
    fail("a bulk copy that is not aligned to 16 bytes");
  }
  Cta& cta = *machine.cta;
  for (uint32_t byte = 0; byte < bytes; byte += 16) poison(cta, destination + byte);
  auto const copy = [=, &cta] { std::memcpy(at_address(cta, destination, bytes), source, bytes); };
  machine.copies.push_back({.cta = &cta, .copy = copy, .barrier = &mbarrier_at(barrier), .bytes = bytes});
}

namespace {
// `write(bytes that were read)`
void push_store(uint32_t source, int64_t bytes, std::function<void(char const*)> const& write) {
  Cta& cta = *machine.cta;
  auto const buffer = std::make_shared<std::vector<char>>(size_t(bytes));
  char const* const from = at_address(cta, source, bytes);
  machine.copies.push_back({.cta = &cta,
                            .copy = [=] { write(buffer->data()); },
                            .lane = machine.lane,
                            .group = machine.lane->committed,
                            .read = [=] { std::memcpy(buffer->data(), from, size_t(bytes)); }});
}
}  // namespace

void store(CUtensorMap const* encoded, uint32_t source, int const* coordinates) {
  TensorMap map;
  std::memcpy(&map, encoded, sizeof(map));
  std::array<int, 5> at;
  std::copy_n(coordinates, 5, at.begin());
  push_store(source, int64_t(map.pitches[0]) * map.box[0] * map.box[1] * map.box[2], [=](char const* from) {
    int const(&place)[5] = *reinterpret_cast<int const(*)[5]>(at.data());
    for_box(map, place, source, [&](uint32_t address, char* to, int64_t inside) {
      std::memcpy(to, from + (address - source), size_t(inside));
    });
  });
}

void store_bytes(void* destination, uint32_t source, uint32_t bytes) {
  push_store(source, bytes, [=](char const* from) { std::memcpy(destination, from, bytes); });
}

void add_bytes(float* destination, uint32_t source, uint32_t bytes) {
  push_store(source, bytes, [=](char const* from) {
    for (uint32_t i = 0; i < bytes / 4; ++i) destination[i] += reinterpret_cast<float const*>(from)[i];
  });
}

void commit_stores() { ++machine.lane->committed; }

void wait_stores(int groups) {
  machine.lane->groups = groups;
  machine.lane->reads = false;
  wait_for(Wait::kStores);
}

void wait_stores_read(int groups) {
  machine.lane->groups = groups;
  machine.lane->reads = true;
  wait_for(Wait::kStores);
}

void issue(Product const& product) {
  Warp& warp = *machine.warp;
  uint64_t const* const lanes = together(Together::kProduct, ~0u, reinterpret_cast<uint64_t>(&product));
  if (threadIdx.x % 32 != 0) {  // lane 0 issues; its lanes' registers must not be read before
    together(Together::kProduct, ~0u, 0);
    return;
  }
  auto const of_lane = [&](int lane) { return reinterpret_cast<Product const*>(lanes[lane]); };
  WarpProduct issued{.product = product, .a = {}, .accumulator = nullptr, .group = warp.committed};
  for (auto const& accumulator : warp.accumulators) {
    if (accumulator->registers[0] == product.d) issued.accumulator = accumulator;
  }
  if (issued.accumulator == nullptr) {
    issued.accumulator = std::make_shared<Accumulator>();
    issued.accumulator->n = product.n;
    issued.accumulator->values.resize(size_t(16 * product.n));
    for (int lane = 0; lane < 32; ++lane) {
      float* const registers = issued.accumulator->registers[lane] = of_lane(lane)->d;
      for_registers(product.n, lane, [&](int i, int row, int column) {
        issued.accumulator->values[size_t(row * product.n + column)] = registers[i];
        registers[i] = NAN;
      });
    }
    warp.accumulators.push_back(issued.accumulator);
  }
  for (int lane = 0; lane < 32; ++lane) std::copy_n(of_lane(lane)->a, 4, issued.a[lane]);
  ++issued.accumulator->under_way;
  issued.accumulator->group = issued.group;
  warp.products.push_back(issued);
  together(Together::kProduct, ~0u, 0);
}

void run_product(Cta& cta, Warp& warp) {
  WarpProduct const issued = std::move(warp.products.front());
  warp.products.pop_front();
  Product const& product = issued.product;
  int const n = product.n;
  static float a[16 * 16], b[16 * 256];  // [k][row], [k][column]
  if (product.a[0] == nullptr) {
    int const warp_of_four = int(&warp - cta.warps.data()) % 4;
    Operand(product.descriptor_a, product.a_along_rows).read(cta, 16 * warp_of_four, 16, product.is_bfloat16, a, 16);
  } else {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        uint32_t const pair = *issued.a[lane][i];
        int const row = lane / 4 + i % 2 * 8, k = lane % 4 * 2 + i / 2 * 8;
        a[k * 16 + row] = decoded(uint16_t(pair), product.is_bfloat16);
        a[(k + 1) * 16 + row] = decoded(uint16_t(pair >> 16), product.is_bfloat16);
      }
    }
  }
  Operand(product.descriptor_b, product.b_along_rows).read(cta, 0, n, product.is_bfloat16, b, n);
  std::vector<float>& values = issued.accumulator->values;
  if (!product.adds) std::fill(values.begin(), values.end(), 0.f);
  for (int row = 0; row < 16; ++row) {
    float* const sums = values.data() + row * n;
    for (int k = 0; k < 16; ++k) {
      float const factor = a[k * 16 + row];
      for (int column = 0; column < n; ++column) sums[column] += factor * b[k * n + column];
    }
  }
  --issued.accumulator->under_way;
}

void wgmma_commit() {
  Warp& warp = *machine.warp;
  together(Together::kCommit, ~0u, 0);
  if (threadIdx.x % 32 == 0) ++warp.committed;
  together(Together::kCommit, ~0u, 0);
}

void wgmma_wait(int groups) {
  Warp& warp = *machine.warp;
  together(Together::kWait, ~0u, 0);
  machine.lane->groups = groups;
  wait_for(Wait::kProducts);
  // The first lane that goes on writes the registers of all.
  std::erase_if(warp.accumulators, [&](auto const& accumulator) {
    if (accumulator->under_way > 0 || accumulator->group >= warp.committed - groups) return false;
    for (int lane = 0; lane < 32; ++lane) {
      for_registers(accumulator->n, lane, [&](int i, int row, int column) {
        accumulator->registers[lane][i] = accumulator->values[size_t(row * accumulator->n + column)];
      });
    }
    return true;
  });
}

void store_matrices(uint32_t address, uint32_t const (&words)[4]) {
  uint64_t const* const addresses = together(Together::kStoreMatrix, ~0u, address);
  uint32_t const lane = threadIdx.x % 32;
  for (uint32_t matrix = 0; matrix < 4; ++matrix) {
    uint32_t const row = uint32_t(addresses[8 * matrix + lane / 4]);
    std::memcpy(at_address(*machine.cta, row + lane % 4 * 4, 4), &words[matrix], 4);
  }
}

void load_matrices(uint32_t address, uint32_t (&words)[4]) {
  uint64_t const* const addresses = together(Together::kLoadMatrix, ~0u, address);
  uint32_t const lane = threadIdx.x % 32;
  for (uint32_t matrix = 0; matrix < 4; ++matrix) {
    uint32_t const row = uint32_t(addresses[8 * matrix + lane / 4]);
    std::memcpy(&words[matrix], at_address(*machine.cta, row + lane % 4 * 4, 4), 4);
  }
}

void copy_bytes(uint32_t address, void const* from, int bytes, int from_bytes) {
  char* const to = at_address(*machine.cta, address, bytes);
  std::memset(to, 0xff, size_t(bytes));
  machine.lane->copies.push_back([=] {
    std::memset(to, 0, size_t(bytes));
    if (from_bytes > 0) std::memcpy(to, from, size_t(from_bytes));
  });
}

void arrive_with_copies(uint32_t barrier) {
  auto const copy = [copies = std::exchange(machine.lane->copies, {})] {
    for (auto const& piece : copies) piece();
  };
  machine.copies.push_back({.cta = machine.cta, .copy = copy, .barrier = &mbarrier_at(barrier), .arrives = true});
}

void finish_copies() {
  for (auto const& piece : std::exchange(machine.lane->copies, {})) piece();
}

void load_transposed(uint32_t address, uint32_t (&words)[4]) {
  uint64_t const* const addresses = together(Together::kLoadMatrix, ~0u, address);
  uint32_t const lane = threadIdx.x % 32;
  for (uint32_t matrix = 0; matrix < 4; ++matrix) {
    uint16_t pair[2];
    for (uint32_t i = 0; i < 2; ++i) {
      uint32_t const row = uint32_t(addresses[8 * matrix + lane % 4 * 2 + i]);
      std::memcpy(&pair[i], at_address(*machine.cta, row + lane / 4 * 2, 2), 2);
    }
    words[matrix] = uint32_t{pair[1]} << 16 | pair[0];
  }
}

// mma.sync m16n8k16: lane 4 g + t has, of A, the words of rows g and g + 8 at columns 2 t and 2 t + 8; of B, those of
// column g at rows 2 t and 2 t + 8; of the sums, rows g and g + 8 at columns 2 t and 2 t + 1.
void multiply(float (&sums)[4], uint32_t const (&a)[4], uint32_t const (&b)[2], bool is_bfloat16) {
  uint32_t words[6][32];
  for (int i = 0; i < 3; ++i) {
    uint64_t const own = i < 2 ? uint64_t{a[2 * i + 1]} << 32 | a[2 * i] : uint64_t{b[1]} << 32 | b[0];
    uint64_t const* const all = together(Together::kShuffle, ~0u, own);
    for (int lane = 0; lane < 32; ++lane) {
      words[2 * i][lane] = uint32_t(all[lane]);
      words[2 * i + 1][lane] = uint32_t(all[lane] >> 32);
    }
  }
  auto const number = [&](uint32_t word, int k) {
    return decoded(uint16_t(k % 2 == 0 ? word : word >> 16), is_bfloat16);
  };
  int const lane = int(threadIdx.x % 32), row = lane / 4, column = lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      float const left = number(words[k / 8 * 2 + i / 2][row * 4 + k % 8 / 2], k);
      float const right = number(words[4 + k / 8][(column + i % 2) * 4 + k % 8 / 2], k);
      sum += left * right;
    }
    sums[i] += sum;
  }
}

void from_e4m3(uint32_t& halves, uint32_t pair) {
  halves = 0;
  for (int i = 0; i < 2; ++i) {
    uint32_t const bits = pair >> 8 * i & 0xff, exponent = bits >> 3 & 15, mantissa = bits & 7;
    float const size = std::ldexp(float(exponent == 0 ? mantissa : 8 + mantissa), int(std::max(1u, exponent)) - 10);
    _Float16 const value = _Float16((bits & 0x7f) == 0x7f ? NAN : bits & 0x80 ? -size : size);
    halves |= uint32_t{std::bit_cast<uint16_t>(value)} << 16 * i;
  }
}

}  // namespace emu

extern "C" {

static CUresult encode(CUtensorMap* result, CUtensorMapDataType type, cuuint32_t rank, void* data,
                       cuuint64_t const* sizes, cuuint64_t const* pitches, cuuint32_t const* box, cuuint32_t const*,
                       CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                       CUtensorMapFloatOOBfill) {
  emu::TensorMap map{};
  map.data = static_cast<char*>(data);
  map.rank = uint8_t(rank);
  map.pitches[0] = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  for (unsigned dim = 0; dim < rank; ++dim) {
    map.sizes[dim] = sizes[dim];
    map.box[dim] = uint16_t(box[dim]);
    if (dim > 0) map.pitches[dim] = pitches[dim - 1];
    if (dim > 0 && pitches[dim - 1] % 16 != 0 && rank < 5) return CUDA_ERROR_INVALID_VALUE;
  }
  map.swizzle_bits = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 3
                     : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 2
                     : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 1
                                                            : 0;
  std::memcpy(result, &map, sizeof(map));
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(char const*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&encode);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

}  // extern "C"
