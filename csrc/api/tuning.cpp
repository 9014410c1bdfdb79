#include "tuning.h"

#include <atomic>
#include <bit>
#include <charconv>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace flash_cute {
namespace {

struct HashKey {
  size_t operator()(TuningKey const& key) const {
    uint64_t hash = 14695981039346656037u;  // FNV-1a, a word at a time
    for (int value : key.values) hash = (hash ^ static_cast<uint32_t>(value)) * 1099511628211u;
    return hash ^ hash >> 32;
  }
};

struct Table {
  std::string gpu;
  int capability;
  std::unordered_map<TuningKey, Choice, HashKey> choices;
};

// A plan of another thread may still read a table that was replaced, so that tables live on. They are loaded by hand,
// and small.
std::atomic<Table const*> current{nullptr};

void publish(std::unique_ptr<Table const> table) {
  static std::mutex mutex;
  static std::vector<std::unique_ptr<Table const>> all;
  std::lock_guard const lock(mutex);
  current.store(table.get(), std::memory_order_release);
  if (table) all.push_back(std::move(table));
}

// Whether the table is of the tensor's GPU. For a plan without one, the GPU's properties must do.
bool belongs_to(Table const& table, TensorInfo const& q, Gpu gpu) {
  return gpu.capability == table.capability && (!is_cuda(q) || device_model(q.device_index) == table.gpu);
}

// Reads "name=value name=value ... choice=name".
std::pair<TuningKey, Choice> parse_row(std::string_view row) {
  TuningKey key{};
  std::array<bool, TuningKey::kFields> given{};
  std::optional<Choice> choice;
  std::istringstream words{std::string(row)};
  for (std::string word; words >> word;) {
    size_t const equals = word.find('=');
    std::string_view const name = std::string_view(word).substr(0, equals);
    std::string_view const text = equals == std::string::npos ? "" : std::string_view(word).substr(equals + 1);
    if (name == "choice") {
      choice = parse_choice(text);
      continue;
    }
    auto const& names = TuningKey::kNames;
    size_t const field = std::find(names.begin(), names.end(), name) - names.begin();
    FLASH_CUTE_CHECK(field < TuningKey::kFields, "tuning: expected the fields of a call, got '", name, "'");
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), key.values[field]);
    FLASH_CUTE_CHECK(error == std::errc() && end == text.data() + text.size(), "tuning: ", name,
                     ": expected a 32-bit number, got '", text, "'");
    given[field] = true;
  }
  for (int field = 0; field < TuningKey::kFields; ++field) {
    FLASH_CUTE_CHECK(given[field], "tuning: expected every call to have ", TuningKey::kNames[field], ", got '", row,
                     "'");
  }
  FLASH_CUTE_CHECK(choice && (choice->backend == Backend::kSm80 || choice->backend == Backend::kSm90),
                   "tuning: expected a choice of sm80 or sm90 for every call, got '", row, "'");
  return {key, *choice};
}

}  // namespace

TuningKey tuning_key(bool backward, FwdArgs const& args, Problem const& problem, Gpu gpu) {
  bool const packed = problem.packed;
  auto const length = [&](int number) {
    return packed ? static_cast<int>(std::min<int64_t>(INT_MAX, std::bit_ceil(static_cast<uint64_t>(number)))) : number;
  };
  return {{backward, args.q.dtype != aoti_torch_dtype_float16(), packed, problem.equal_lengths,
           backward && problem.deterministic, problem.softcap > 0, problem.has_alibi, length(problem.batch),
           problem.heads_q, problem.heads_kv, length(problem.len_q), length(problem.len_k), problem.head_dim,
           problem.head_dim_v,
           problem.band.lower, problem.band.upper, gpu.num_sms}};
}

bool has_tuning() { return current.load(std::memory_order_relaxed) != nullptr; }

TuningEntry find_tuning(TuningKey const& key, TensorInfo const& q, Gpu gpu) {
  Table const* const table = current.load(std::memory_order_acquire);
  if (table == nullptr) return {Tuned::kNoTable, {}};
  if (!belongs_to(*table, q, gpu)) {
    FLASH_CUTE_CHECK(!is_cuda(q) || some_device_is(table->gpu), "tuning: expected a file measured on '",
                     device_model(q.device_index), "', got one of '", table->gpu,
                     "', which is no GPU of this process; flash_cute.use_tuning(None) unloads it");
    return {Tuned::kOtherGpu, {}};
  }
  auto const found = table->choices.find(key);
  return found == table->choices.end() ? TuningEntry{Tuned::kNoEntry, {}} : TuningEntry{Tuned::kChosen, found->second};
}

std::string tuning_gpu() {
  Table const* const table = current.load(std::memory_order_acquire);
  return table == nullptr ? "" : table->gpu;
}

void set_tuning(std::string_view gpu, int64_t capability, std::string_view rows) {
  if (gpu.empty()) return publish(nullptr);
  auto table = std::make_unique<Table>();
  table->gpu = gpu;
  table->capability = static_cast<int>(capability);
  while (!rows.empty()) {
    size_t const end = std::min(rows.find('\n'), rows.size());
    auto const [key, choice] = parse_row(rows.substr(0, end));
    table->choices.insert_or_assign(key, choice);
    rows.remove_prefix(std::min(end + 1, rows.size()));
  }
  publish(std::move(table));
}

}  // namespace flash_cute
