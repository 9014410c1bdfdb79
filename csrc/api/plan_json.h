// A plan as JSON, for `explain` and tests: what both directions have in common, and the sentences that give reasons.
#pragma once

#include <cstdio>
#include <vector>

#include "tuning.h"

namespace flash_cute {

inline std::string json_string(std::string_view text) {
  std::string result = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
    result += c;
  }
  return result + "\"";
}

// A JSON object with its fields in the order of the calls.
class JsonObject {
 public:
  JsonObject& raw(std::string_view key, std::string const& value) {
    text_ += (text_.empty() ? "" : ", ") + json_string(key) + ": " + value;
    return *this;
  }
  JsonObject& string(std::string_view key, std::string_view value) { return raw(key, json_string(value)); }
  JsonObject& boolean(std::string_view key, bool value) { return raw(key, value ? "true" : "false"); }
  JsonObject& number(std::string_view key, int64_t value) { return raw(key, std::to_string(value)); }
  JsonObject& number(std::string_view key, double value) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.17g", value);
    return raw(key, digits);
  }
  std::string text() const { return "{" + text_ + "}"; }

 private:
  std::string text_;
};

inline std::string json_list(std::vector<std::string> const& items) {
  std::string text;
  for (std::string const& item : items) text += (text.empty() ? "" : ", ") + json_string(item);
  return "[" + text + "]";
}

inline std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

inline std::string causal_name(Causal causal) {
  switch (causal) {
    case Causal::kNone: return "none";
    case Causal::kTopLeft: return "top_left";
    case Causal::kBottomRight: return "bottom_right";
  }
  return "";
}

// The kind of mask that has an effect in this call.
inline std::string mask_name(Problem const& problem) {
  Band const& band = problem.band;
  if (band.has_lower()) return "window";
  if (!band.has_upper()) return "full";
  return problem.causal == Causal::kNone ? "window" : "causal";
}

enum class Access { kRead, kWritten };  // by the kernel

// A tensor of a call, and why it is copied.
struct NamedCopy {
  char const* name;
  Copy copy;
  Access access;
  int padded;  // its head dim as the kernel sees it
};

// `named.padded`: the padded head dim.
inline std::string copy_reason(NamedCopy const& named, Problem const& problem) {
  char const last = std::string_view(named.name).back();  // of q, k, dq and dk, or of v, out, dout and dv
  int const head_dim = last == 'q' || last == 'k' ? problem.head_dim : problem.head_dim_v;
  int const vector = problem.vector();
  switch (named.copy) {
    case Copy::kNone: return "";
    case Copy::kHeadDimPadded:
      return "head dim " + std::to_string(head_dim) + " is padded to " + std::to_string(named.padded) +
             (named.padded - head_dim < vector ? ", a multiple of " + std::to_string(vector) : ", that of the others");
    case Copy::kLastDimStrided: return "its last dim is not contiguous";
    case Copy::kBaseMisaligned: return "its first element is not at a 16-byte boundary";
    case Copy::kStrideMisaligned:
      return "a batch, head or row stride is not a multiple of " + std::to_string(vector) + " elements";
  }
  return "";
}

inline std::string copies_json(std::vector<NamedCopy> const& tensors, Problem const& problem) {
  JsonObject copies;
  for (NamedCopy const& named : tensors) {
    copies.raw(named.name, named.copy == Copy::kNone ? "null" : json_string(copy_reason(named, problem)));
  }
  return copies.text();
}

inline std::string microseconds_text(double time) {
  char digits[32];
  std::snprintf(digits, sizeof digits, time < 100 ? "%.1f us" : "%.0f us", time);
  return digits;
}

template <class DecisionType>
std::string why_backend(Problem const& problem, DecisionType const& decision, std::string const& direction) {
  std::string const name = backend_name(decision.backend());
  std::string const gpu = "compute capability " + capability_text(decision.gpu.capability);
  if (problem.asked.backend != Backend::kAuto) return "Backend " + name + " was asked for, on " + gpu + ".";
  if (problem.accumulate != AccumulateIn::kFloat32) {
    return "Backend " + name + " is the one that accumulates in float16, as was asked for, on " + gpu + ".";
  }
  if (decision.tuned == Tuned::kChosen) return "Backend " + name + " is the choice of a tuning, on " + gpu + ".";
  if (Predicted const& predicted = decision.predicted; predicted.rival_us != kNoTime) {
    return "Backend " + name + " is the faster one for this call on " + gpu + ", as predicted from its tiles: " +
           microseconds_text(predicted.us) + ", " + backend_name(predicted.rival) + " " +
           microseconds_text(predicted.rival_us) + ".";
  }
  if (decision.backend() == Backend::kSm90) return "Backend sm90 is the one for " + gpu + ".";
  if (decision.gpu.capability != 90) return "Backend sm80 serves " + gpu + "; sm90 needs exactly 9.0.";
  return "Backend sm80 serves " + gpu + " because this build has no sm90 " + direction + " kernel for head dim " +
         std::to_string(problem.head_dim) + ".";
}

template <class DecisionType>
std::string table_entry(DecisionType const& decision) {
  return std::string("the ") + backend_name(decision.backend()) + " table's entry for head dim " +
         std::to_string(decision.plan.head_dim);
}

// Sentences about the head dim and the copies.
template <class DecisionType>
void add_tensor_reasons(std::vector<std::string>& sentences, Problem const& problem, DecisionType const& decision,
                        std::vector<NamedCopy> const& tensors) {
  if (decision.plan.head_dim != decision.padded_head_dim) {
    sentences.push_back("Head dim " + std::to_string(problem.head_dim) + " runs in the kernel for " +
                        std::to_string(decision.plan.head_dim) + ", the smallest in this build that holds it.");
  }
  for (NamedCopy const& named : tensors) {
    if (named.copy == Copy::kNone) continue;
    bool const written = named.access == Access::kWritten;
    sentences.push_back(std::string(named.name) +
                        (written ? " is written to a buffer and copied from it: " : " is copied once: ") +
                        copy_reason(named, problem) + ".");
  }
}

// What a tuning table has to do with the choice; nothing where none is loaded.
template <class DecisionType>
void add_tuning_reason(std::vector<std::string>& sentences, DecisionType const& decision) {
  if (decision.tuned == Tuned::kNoTable) return;
  std::string const table = "the tuning of " + tuning_gpu();
  if (decision.tuned == Tuned::kChosen) {
    sentences.push_back("Backend, tile and split are those of " + table + ", where this call was measured.");
    return;
  }
  std::string const why = decision.tuned == Tuned::kOtherGpu ? " is not of this GPU."
                          : decision.tuned == Tuned::kNoEntry ? " has no entry for this call."
                                                              : " names a kernel that is not in this build.";
  sentences.push_back("The choice is the plan's own: " + table + why);
}

inline std::string tuning_key_json(TuningKey const& key) {
  JsonObject json;
  for (int field = 0; field < TuningKey::kFields; ++field) {
    json.number(TuningKey::kNames[field], int64_t{key.values[field]});
  }
  return json.text();
}

// The call as a tuning table has it, where it can, and whether a table decided.
template <class DecisionType>
void add_tuning(JsonObject& json, Problem const& problem, DecisionType const& decision, TuningKey const& key) {
  bool const may_be_tuned = decision.plan.dtype != DType::kFloat8 && !problem.has_mask();
  json.boolean("tuned", decision.tuned == Tuned::kChosen)
      .raw("tuning_key", may_be_tuned ? tuning_key_json(key) : "null");
}

inline std::string window_json(FwdArgs const& args) {
  if (!args.window_left && !args.window_right) return "null";
  auto const side = [](std::optional<int64_t> limit) { return limit ? std::to_string(*limit) : "null"; };
  return "[" + side(args.window_left) + ", " + side(args.window_right) + "]";
}

inline JsonObject call_json(std::string_view backend, FwdArgs const& args, Problem const& problem) {
  JsonObject json;
  json.string("backend", backend)
      .string("dtype", dtype_name(args.q.dtype))
      .number("batch", int64_t{problem.batch})
      .number("heads_q", int64_t{problem.heads_q})
      .number("heads_kv", int64_t{problem.heads_kv})
      .number("len_q", int64_t{problem.len_q})
      .number("len_k", int64_t{problem.len_k})
      .number("head_dim", int64_t{problem.head_dim})
      .number("head_dim_v", int64_t{problem.head_dim_v})
      .string("causal", causal_name(problem.causal))
      .raw("window", window_json(args))
      .string("mask", mask_name(problem))
      .number("scale", problem.scale);
  if (problem.softcap > 0) {
    json.number("softcap", problem.softcap);
  } else {
    json.raw("softcap", "null");
  }
  json.boolean("sinks", problem.has_sinks).boolean("alibi", problem.has_alibi);
  if (args.fp8) {
    json.string("dtype_k", dtype_name(args.k.dtype))
        .string("dtype_v", dtype_name(args.v.dtype))
        .string("out_dtype", args.fp8->out_dtype);
  }
  if (problem.has_mask()) {
    json.number("mask_intervals", int64_t{problem.mask_intervals})
        .boolean("mask_matrix", problem.mask_matrix)
        .number("mask_batches", int64_t{problem.mask_batches})
        .number("mask_heads", int64_t{problem.mask_heads});
  }
  return json;
}

template <class DecisionType>
void add_kernel(JsonObject& json, DecisionType const& decision, int64_t tiles) {
  json.string("family", decision.instance->family->name)
      .string("kernel", decision.plan.kernel)
      .number("kernel_head_dim", int64_t{decision.plan.head_dim})
      .number("entry", int64_t{decision.plan.entry})
      .string("tile", decision.instance->family->tile_name(decision.plan))
      .number("block_m", int64_t{decision.plan.shape.block_m})
      .number("block_n", int64_t{decision.plan.shape.block_n})
      .number("threads", int64_t{decision.plan.shape.threads})
      .number("stages", int64_t{decision.plan.shape.stages})
      .number("smem_bytes", int64_t{decision.plan.shape.smem_bytes})
      .number("ctas_per_sm", int64_t{decision.plan.shape.ctas_per_sm})
      .number("tiles", tiles)
      .number("capability", int64_t{decision.gpu.capability});
}

// What a mask makes of a call; nothing without one.
inline void add_mask_reason(std::vector<std::string>& sentences, Problem const& problem) {
  if (!problem.has_mask()) return;
  if (problem.mask_matrix) {
    sentences.push_back("The mask has a matrix of booleans or of blocks, which is read on the device: tiles that no "
                        "row sees are left out.");
    return;
  }
  std::string const intervals = problem.mask_intervals == 1 ? "an interval" : "two intervals";
  sentences.push_back("The mask has " + intervals +
                      " of rows for each key, which are read on the device: tiles that no row sees are left out.");
}

inline char const* variant_name(Variant variant) {
  if (variant.reads_mask) return variant.modifies_scores ? "masked modified" : "masked";
  if (variant.reads_sequences) return variant.modifies_scores ? "modified" : "packed";
  return variant.modifies_scores ? "dense modified" : "dense";
}

inline std::vector<std::string> cpu_reasons(Problem const& problem) {
  return {problem.asked.backend == Backend::kCpu ? "Backend cpu was asked for." : "Backend cpu serves CPU tensors."};
}

// The tensors' own GPU, or, for another capability, one with the SM count of an H100.
inline Gpu planned_gpu(TensorInfo const& q, int capability) {
  if (is_cuda(q)) {
    Gpu const own = device_gpu(q.device_index);
    if (capability == 0 || capability == own.capability) return own;
  }
  return {.capability = capability, .num_sms = 132};
}

// The input of a plan: a checked call, and the GPU, or none for the CPU.
struct PlannedCall {
  Problem problem;
  std::optional<Gpu> gpu;
};

// `check(on_cuda)` checks the call and makes the problem.
template <class Check>
PlannedCall check_planned(FwdArgs const& args, int64_t capability, Check const& check) {
  FLASH_CUTE_CHECK(capability >= 0 && capability < 1000,
                   "capability: expected 0 (the tensors' own device) or a GPU's, like 90, got ", capability);
  bool const on_cuda = capability > 0 || is_cuda(args.q);
  Problem const problem = check(on_cuda);
  if (!on_cuda && is_cpu(args.q)) return {.problem = problem, .gpu = std::nullopt};
  FLASH_CUTE_CHECK(on_cuda, "capability: expected that of a GPU, like 90, since q is on ", device_name(args.q),
                   "; got 0");
  return {.problem = problem, .gpu = planned_gpu(args.q, static_cast<int>(capability))};
}

inline PlannedCall check_planned(FwdArgs const& args, int64_t capability) {
  return check_planned(args, capability, [&](bool on_cuda) { return check_fwd(args, on_cuda); });
}

// The plan of a checked call.
JsonObject fwd_plan_object(FwdArgs const& args, PlannedCall const& call);
JsonObject bwd_plan_object(FwdArgs const& args, PlannedCall const& call);

}  // namespace flash_cute
