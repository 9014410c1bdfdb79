// The plan of a forward as JSON, for people and tests: what plan_fwd decided, and sentences that say why.
#include <cstdio>
#include <vector>

#include "fwd.h"

namespace flash_cute {
namespace {

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
    result += c;
  }
  return result + "\"";
}

// One JSON object, its fields in the order of the calls.
class JsonObject {
 public:
  JsonObject& raw(std::string_view key, std::string const& value) {
    text_ += (text_.empty() ? "" : ", ") + quoted(key) + ": " + value;
    return *this;
  }
  JsonObject& string(std::string_view key, std::string_view value) { return raw(key, quoted(value)); }
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

std::string json_list(std::vector<std::string> const& items) {
  std::string text;
  for (std::string const& item : items) text += (text.empty() ? "" : ", ") + quoted(item);
  return "[" + text + "]";
}

std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

std::string backend_name(Backend backend) {
  switch (backend) {
    case Backend::kAuto: return "auto";
    case Backend::kCpu: return "cpu";
    case Backend::kSm80: return "sm80";
    case Backend::kSm90: return "sm90";
  }
  return "";
}

std::string causal_name(Causal causal) {
  switch (causal) {
    case Causal::kNone: return "none";
    case Causal::kTopLeft: return "top_left";
    case Causal::kBottomRight: return "bottom_right";
  }
  return "";
}

std::string copy_reason(Copy copy, FwdProblem const& problem, FwdDecision const& decision) {
  switch (copy) {
    case Copy::kNone: return "";
    case Copy::kHeadDimPadded:
      return "head dim " + std::to_string(problem.head_dim) + " is padded to " +
             std::to_string(decision.padded_head_dim) + ", a multiple of 8";
    case Copy::kLastDimStrided: return "its last dim is not contiguous";
    case Copy::kBaseMisaligned: return "its first element is not at a 16-byte boundary";
    case Copy::kStrideMisaligned: return "a batch, head or row stride is not a multiple of 8 elements";
  }
  return "";
}

std::string copies_json(FwdProblem const& problem, FwdDecision const* decision) {
  JsonObject copies;
  auto add = [&](char const* name, Copy copy) {
    copies.raw(name, copy == Copy::kNone ? "null" : quoted(copy_reason(copy, problem, *decision)));
  };
  add("q", decision ? decision->q : Copy::kNone);
  add("k", decision ? decision->k : Copy::kNone);
  add("v", decision ? decision->v : Copy::kNone);
  add("out", decision ? decision->out : Copy::kNone);
  return copies.text();
}

std::string why_backend(FwdProblem const& problem, FwdDecision const& decision) {
  std::string const name = backend_name(decision.backend);
  std::string const gpu = "compute capability " + capability_text(decision.gpu.capability);
  if (problem.backend != Backend::kAuto) return "Backend " + name + " was asked for, on " + gpu + ".";
  if (decision.backend == Backend::kSm90) return "Backend sm90 is the one for " + gpu + ".";
  if (decision.gpu.capability != 90) return "Backend sm80 serves " + gpu + "; sm90 needs exactly 9.0.";
  return "Backend sm80 serves " + gpu + " because this build has no sm90 kernel for head dim " +
         std::to_string(problem.head_dim) + (decision.plan.causal ? ", causal." : ", full.");
}

std::string why_tile(FwdProblem const& problem, FwdDecision const& decision) {
  KernelShape const& shape = decision.shape;
  std::string text = "Tile of " + std::to_string(shape.block_m) + " query rows by " + std::to_string(shape.block_n) +
                     " keys: the " + backend_name(decision.backend) + " table's entry for head dim " +
                     std::to_string(decision.plan.head_dim) + (decision.plan.causal ? ", causal" : ", full");
  if (decision.backend == Backend::kSm80) {
    text += ", on chips with up to " + std::to_string(sm80::kMaxSmemBytes[decision.plan.config] / 1024) +
            " KB of shared memory a CTA";
  } else {
    text += ", with " + std::to_string(num_tiles(problem, shape)) + " tiles for " +
            std::to_string(decision.gpu.num_sms) + " multiprocessors";
  }
  if (problem.len_k == 0) text += " (there are no keys: out is 0, lse -inf)";
  return text + ".";
}

std::vector<std::string> reasons(FwdProblem const& problem, FwdDecision const& decision) {
  std::vector<std::string> sentences{why_backend(problem, decision), why_tile(problem, decision)};
  if (decision.plan.head_dim != decision.padded_head_dim) {
    sentences.push_back("Head dim " + std::to_string(problem.head_dim) + " runs in the kernel for " +
                        std::to_string(decision.plan.head_dim) + ", the smallest in this build that holds it.");
  }
  auto add_copy = [&](std::string const& name, std::string const& verb, Copy copy) {
    if (copy == Copy::kNone) return;
    sentences.push_back(name + " is " + verb + ": " + copy_reason(copy, problem, decision) + ".");
  };
  add_copy("q", "copied once", decision.q);
  add_copy("k", "copied once", decision.k);
  add_copy("v", "copied once", decision.v);
  add_copy("out", "written to a buffer and copied from it", decision.out);
  if (num_tiles(problem, decision.shape) == 0) sentences.push_back("Nothing is launched: the output is empty.");
  if (problem.heads_kv > 0 && problem.heads_q > problem.heads_kv) {
    sentences.push_back("Every " + std::to_string(problem.heads_q / problem.heads_kv) +
                        " query heads read one head of k and v in place.");
  }
  return sentences;
}

void add_call(JsonObject& json, FwdArgs const& args, FwdProblem const& problem) {
  json.string("dtype", dtype_name(args.q.dtype))
      .number("batch", int64_t{problem.batch})
      .number("heads_q", int64_t{problem.heads_q})
      .number("heads_kv", int64_t{problem.heads_kv})
      .number("len_q", int64_t{problem.len_q})
      .number("len_k", int64_t{problem.len_k})
      .number("head_dim", int64_t{problem.head_dim})
      .string("causal", causal_name(problem.causal))
      .string("mask", problem.causal == Causal::kNone ? "full" : "causal")
      .number("scale", problem.scale);
}

std::string cpu_plan_json(FwdArgs const& args, FwdProblem const& problem) {
  JsonObject json;
  json.string("backend", "cpu");
  add_call(json, args, problem);
  json.raw("copies", copies_json(problem, nullptr));
  json.raw("reasons", json_list({problem.backend == Backend::kCpu ? "Backend cpu was asked for."
                                                                  : "Backend cpu serves CPU tensors."}));
  return json.text();
}

std::string cuda_plan_json(FwdArgs const& args, FwdProblem const& problem, FwdDecision const& decision) {
  JsonObject json;
  json.string("backend", backend_name(decision.backend));
  add_call(json, args, problem);
  json.string("kernel", "fwd_kernel")
      .number("kernel_head_dim", int64_t{decision.plan.head_dim})
      .number("config", int64_t{decision.plan.config})
      .number("block_m", int64_t{decision.shape.block_m})
      .number("block_n", int64_t{decision.shape.block_n})
      .number("threads", int64_t{decision.shape.threads})
      .number("stages", int64_t{decision.shape.stages})
      .number("smem_bytes", int64_t{decision.shape.smem_bytes})
      .number("ctas_per_sm", int64_t{decision.shape.ctas_per_sm})
      .number("tiles", num_tiles(problem, decision.shape))
      .number("capability", int64_t{decision.gpu.capability})
      .raw("copies", copies_json(problem, &decision))
      .raw("reasons", json_list(reasons(problem, decision)));
  return json.text();
}

// The tensors' own GPU unless another capability is asked for; then one as large as an H100.
Gpu planned_gpu(TensorInfo const& q, int capability) {
  if (is_cuda(q)) {
    Gpu const own = device_gpu(q.device_index);
    if (capability == 0 || capability == own.capability) return own;
  }
  return {.capability = capability, .num_sms = 132};
}

}  // namespace

std::string fwd_plan_json(FwdArgs const& args, int64_t capability) {
  FLASH_CUTE_CHECK(capability >= 0 && capability < 1000,
                   "capability: expected 0 (the tensors' own device) or a GPU's, like 90, got ", capability);
  bool const on_cuda = capability > 0 || is_cuda(args.q);
  FwdProblem const problem = check_fwd(args, on_cuda);
  if (!on_cuda && is_cpu(args.q)) return cpu_plan_json(args, problem);
  FLASH_CUTE_CHECK(on_cuda, "capability: expected that of a GPU, like 90, since q is on ", device_name(args.q),
                   "; got 0");
  return cuda_plan_json(args, problem, plan_fwd(args, problem, planned_gpu(args.q, static_cast<int>(capability))));
}

}  // namespace flash_cute
