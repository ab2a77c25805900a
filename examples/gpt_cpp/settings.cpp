#include "options.h"

#include <zeroth/engine/settings.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

namespace gpt {
namespace {

using nlohmann::json;
using Pointer = json::json_pointer;

constexpr const char* kStage = "/zero_optimization/stage";
constexpr const char* kTrain = "/train_batch_size";
constexpr const char* kMicro = "/train_micro_batch_size_per_gpu";
constexpr const char* kAccumulate = "/gradient_accumulation_steps";
constexpr const char* kClip = "/gradient_clipping";
constexpr const char* kOffload = "/zero_optimization/offload_";
constexpr const char* kMemoryLimit = "/zeroth/memory_limit_bytes";
constexpr const char* kLr = "/optimizer/params/lr";
constexpr const char* kBf16 = "/bf16/enabled";
constexpr const char* kFp16 = "/fp16/enabled";
constexpr const char* kMesh = "/zeroth/mesh/";
constexpr double kDefaultLr = 1e-3;
constexpr std::int64_t kDefaultBatch = 8;

// What the file says, to know where arguments and defaults have their place. It is read for good, and judged,
// by zeroth::Config: here a file that is no JSON counts as empty.
json peek(const std::filesystem::path& path) {
  std::ifstream file(path);
  json document = json::parse(file, nullptr, /*allow_exceptions=*/false);
  return document.is_object() ? document : json::object();
}

// Collects the values that win over the file.
class Overrides {
 public:
  explicit Overrides(const std::filesystem::path& path) : document_(peek(path)), file_(path.string()) {}

  // The file says something else than "auto".
  [[nodiscard]] bool says(const char* where) const {
    const Pointer pointer(where);
    return document_.contains(pointer) && document_.at(pointer) != "auto";
  }
  [[nodiscard]] bool mentions(const char* where) const { return document_.contains(Pointer(where)); }
  [[nodiscard]] bool is_true(const char* where) const { return says(where) && document_.at(Pointer(where)) == true; }
  // A positive integer of the file, or 0.
  [[nodiscard]] std::int64_t size(const char* where) const {
    const bool number = says(where) && document_.at(Pointer(where)).is_number_integer();
    return number ? std::max<std::int64_t>(0, document_.at(Pointer(where)).get<std::int64_t>()) : 0;
  }
  void argument(const std::string& name, const char* where, const json& value) {
    if (says(where) && document_.at(Pointer(where)) != value) {
      const std::string old = document_.at(Pointer(where)).dump();
      notes_.push_back(fmt::format("{}: {} = {} replaces {} of {}", name, where, value.dump(), old, file_));
    }
    values_.push_back({.pointer = where, .json = value.dump(), .origin = name});
  }
  template <class T>
  void argument(const std::string& name, const char* where, const std::optional<T>& value) {
    if (value) {
      argument(name, where, json(*value));
    }
  }
  void fallback(const char* where, const json& value) {
    if (!says(where)) {
      values_.push_back({.pointer = where, .json = value.dump(), .origin = "default of zeroth-gpt"});
    }
  }
  // Only where the file leaves the value to its caller.
  void resolve_auto(const char* where, const json& value) {
    if (mentions(where)) {
      fallback(where, value);
    }
  }
  [[nodiscard]] zeroth::Config config(const std::vector<zeroth::ConfigOverride>& more = {}) const {
    std::vector<zeroth::ConfigOverride> every = values_;
    every.insert(every.end(), more.begin(), more.end());
    return file_.empty() ? zeroth::Config::from_json_text("{}", "zeroth-gpt", every)
                         : zeroth::Config::from_file(file_, every);
  }
  [[nodiscard]] std::vector<std::string> notes() const { return notes_; }

 private:
  json document_;
  std::string file_;
  std::vector<zeroth::ConfigOverride> values_{};
  std::vector<std::string> notes_{};
};

// The three sizes depend on each other. With --batch or --accumulate the product follows them; else a product
// in the file decides about what the file leaves open.
void merge_batch(const Options& options, std::int64_t data_ranks, Overrides& overrides) {
  const std::int64_t train = options.batch || options.accumulate ? 0 : overrides.size(kTrain);
  const std::int64_t file_micro = options.batch.value_or(overrides.size(kMicro));
  const std::int64_t accumulate = [&] {
    const std::int64_t given = options.accumulate.value_or(overrides.size(kAccumulate));
    if (given > 0 || train == 0 || file_micro == 0) {
      return std::max<std::int64_t>(1, given);
    }
    return std::max<std::int64_t>(1, train / (data_ranks * file_micro));
  }();
  const std::int64_t micro = [&] {
    if (file_micro > 0) {
      return file_micro;
    }
    return train == 0 ? kDefaultBatch : std::max<std::int64_t>(1, train / (data_ranks * accumulate));
  }();
  overrides.argument("--batch", kMicro, options.batch);
  overrides.argument("--accumulate", kAccumulate, options.accumulate);
  if (!options.batch) {
    overrides.fallback(kMicro, micro);
  }
  if (!options.accumulate) {
    overrides.fallback(kAccumulate, accumulate);
  }
  if (train == 0 && overrides.mentions(kTrain)) {
    overrides.argument("--batch and --accumulate", kTrain, json(micro * accumulate * data_ranks));
  }
}

// Ranks with batches of their own, which have to be known before the batch: with one of size 1 in the place of what is
// not known yet.
int find_data_ranks(int world_size, const Overrides& overrides) {
  std::vector<const char*> sizes{kMicro, kAccumulate};
  if (overrides.mentions(kTrain)) {
    sizes.push_back(kTrain);
  }
  std::vector<zeroth::ConfigOverride> ones;
  for (const char* const size : sizes) {
    ones.push_back({.pointer = size, .json = "1", .origin = "zeroth-gpt"});
  }
  return zeroth::data_ranks_of(overrides.config(ones), world_size);
}

// AdamW and a warmed-up cosine unless the file brings its own; betas as is usual for language models.
void merge_optimizer(const Options& options, Overrides& overrides) {
  overrides.argument("--lr", kLr, options.lr);
  if (!overrides.says("/optimizer")) {
    overrides.fallback("/optimizer/type", "AdamW");
    overrides.fallback("/optimizer/params/betas", {0.9, 0.95});
    overrides.fallback("/optimizer/params/weight_decay", 0.1);
    if (!options.lr) {
      overrides.fallback(kLr, kDefaultLr);
    }
  } else if (!options.lr) {
    overrides.resolve_auto(kLr, kDefaultLr);
  }
  const std::int64_t warmup = std::min<std::int64_t>(100, std::max<std::int64_t>(1, options.steps / 10));
  const std::int64_t total = std::max<std::int64_t>(options.steps, warmup + 1);
  if (!overrides.says("/scheduler")) {
    overrides.fallback("/scheduler/type", "WarmupCosineLR");
    overrides.fallback("/scheduler/params/total_num_steps", total);
    overrides.fallback("/scheduler/params/warmup_num_steps", warmup);
    overrides.fallback("/scheduler/params/warmup_min_ratio", 0.1);  // the first step trains, too
    overrides.fallback("/scheduler/params/cos_min_ratio", 0.1);
    return;
  }
  overrides.resolve_auto("/scheduler/params/total_num_steps", total);
  overrides.resolve_auto("/scheduler/params/warmup_num_steps", warmup);
}

void merge_dtype(const Options& options, Overrides& overrides) {
  for (const auto& [name, key] : {std::pair{"bf16", kBf16}, std::pair{"fp16", kFp16}}) {
    if (!options.dtype) {
      overrides.resolve_auto(key, false);
    } else if (*options.dtype == name || overrides.mentions(key)) {
      overrides.argument("--dtype " + *options.dtype, key, json(*options.dtype == name));
    }
  }
}

}  // namespace

Settings make_settings(const Options& options, int world_size) {
  Overrides overrides(options.config_path);
  for (const auto& [axis, size] : options.mesh) {
    overrides.argument("--mesh", (kMesh + axis).c_str(), json(size));
  }
  merge_optimizer(options, overrides);
  merge_dtype(options, overrides);
  overrides.argument("--zero-stage", kStage, options.zero_stage);
  if (!options.zero_stage) {
    overrides.fallback(kStage, 3);
  }
  overrides.argument("--clip", kClip, options.clip);
  for (const auto& [name, folder] :
       {std::pair("optimizer", options.offload_optimizer), std::pair("param", options.offload_param)}) {
    if (!folder) continue;
    const std::string section = kOffload + std::string(name);
    overrides.argument("--offload-" + std::string(name), (section + "/device").c_str(), json("nvme"));
    overrides.argument("--offload-" + std::string(name), (section + "/nvme_path").c_str(), folder);
  }
  if (options.memory_limit_mib) {
    overrides.argument("--memory-limit", kMemoryLimit, json(std::int64_t{*options.memory_limit_mib} << 20U));
  }
  if (!options.clip) {
    overrides.fallback(kClip, 1.0);
  }
  const int data_ranks = find_data_ranks(world_size, overrides);
  merge_batch(options, data_ranks, overrides);

  Settings settings;
  settings.config = overrides.config();
  settings.data_ranks = data_ranks;
  settings.batch = settings.config.resolve(data_ranks);
  const bool fp16 = settings.config.fp16.enabled;
  settings.dtype = options.dtype.value_or(settings.config.bf16 ? "bf16" : fp16 ? "fp16" : "fp32");
  settings.stages = settings.config.mesh.pp;
  settings.notes = overrides.notes();
  return settings;
}

}  // namespace gpt
