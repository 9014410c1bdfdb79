// The operators of tuning, for flash_cute/tune: none takes tensors.
//
//   set_tuning        loads a table of choices, see tuning.h; an empty name of a GPU unloads it
//   tuner_runs        whether this thread may name choices in `backend`, and no table applies to it; returns what was
//   choices           the names of the sm80 tables and of the sm90 tiles, separated by spaces
#include <torch/csrc/stable/library.h>

#include "stack.h"
#include "tuning.h"

namespace flash_cute {
namespace {

void boxed_set_tuning(StableIValue* stack, uint64_t, uint64_t) {
  StackReader reader(stack);
  String const gpu = reader.string();
  int64_t const capability = reader.value<int64_t>();
  String const rows = reader.string();
  set_tuning(view(gpu), capability, view(rows));
}

void boxed_tuner_runs(StableIValue* stack, uint64_t, uint64_t) {
  bool const before = tuner_is_running;
  tuner_is_running = StackReader(stack).value<bool>();
  stack[0] = stable::from(before);
}

void boxed_choices(StableIValue* stack, uint64_t, uint64_t) {
  std::string names;
  for (char const* chip : sm80::kChipNames) names += std::string(" sm80:") + chip;
  for (char const* entry : sm90::forward::rows::kEntryNames) names += std::string(" sm90:") + entry;
  stack[0] = stable::from(names.substr(1));
}

}  // namespace
}  // namespace flash_cute

STABLE_TORCH_LIBRARY_FRAGMENT(flash_cute, m) {
  m.def("set_tuning(str gpu, int capability, str rows) -> ()");
  m.def("tuner_runs(bool running) -> bool");
  m.def("choices() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, m) {
  m.impl("set_tuning", &flash_cute::boxed_set_tuning);
  m.impl("tuner_runs", &flash_cute::boxed_tuner_runs);
  m.impl("choices", &flash_cute::boxed_choices);
}
