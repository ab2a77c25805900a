#include "engine/config/check.h"

#include <zeroth/base/text.h>
#include <zeroth/engine/config.h>

#include <algorithm>
#include <cmath>

namespace zeroth {
namespace {

using config::Json;
using config::KeySpec;

void check_finite(const Json& value, std::string_view pointer) {
  if (value.is_array()) {
    for (const Json& part : value) check_finite(part, pointer);
  }
  ZR_CHECK(!value.is_number_float() || std::isfinite(value.get<double>()), ErrorCode::kConfig,
           "the value is not finite", {.where = "engine.config", .which = std::string(pointer)});
}

template <class Keep>
Json write(const Config& config, const Keep& keep) {
  Json root = Json::object();
  for (const KeySpec& key : config::honoured_keys()) {
    if (!keep(key) || (key.applies != nullptr && !key.applies(config))) continue;
    Json value = key.write(config);
    check_finite(value, key.pointer);
    if (!value.is_null()) root[Json::json_pointer{std::string(key.pointer)}] = std::move(value);
  }
  return root;
}

Json shared(const Config& config) {
  return write(config, [](const KeySpec& key) { return key.shared; });
}

std::string error_message(std::string_view origin, const std::vector<ConfigProblem>& problems, std::size_t total) {
  if (total == 1) {
    const ConfigProblem& only = problems.front();
    return (only.origin.empty() ? std::string(origin) : only.origin) + ": " + only.what;
  }
  // Overrides have origins of their own.
  const auto is_of_document = [&](const ConfigProblem& one) {
    return one.origin.empty() || one.origin == origin || one.origin.starts_with(std::string(origin) + ":");
  };
  const bool of_document = std::ranges::any_of(problems, is_of_document);
  const bool of_others = !std::ranges::all_of(problems, is_of_document);
  const std::string document(origin);
  std::string text = std::to_string(total) + " problems in " +
                     (!of_others    ? document
                      : of_document ? document + " and in what overrides it"
                                    : "what overrides " + document);
  for (const ConfigProblem& problem : problems) text += "\n  - " + problem.text();
  if (total > problems.size()) text += "\n  - and " + std::to_string(total - problems.size()) + " more";
  return text;
}

ErrorContext error_context(const std::vector<ConfigProblem>& problems, std::size_t total) {
  ErrorContext context{.where = "engine.config"};
  if (total == 1) {
    const ConfigProblem& only = problems.front();
    context.which = only.pointer;
    context.expected = only.expected;
    context.got = only.got;
    context.hint = only.hint;
  }
  return context;
}

}  // namespace

std::string HintNote::text() const {
  return pointer + " = " + given + " (" + origin + "): " + instead;
}

std::string ConfigProblem::text() const {
  std::string out = origin;
  for (const auto& [before, part] :
       {std::pair{": ", &pointer}, {": ", &what}, {"; expected ", &expected}, {"; got ", &got}, {"; hint: ", &hint}}) {
    if (!part->empty()) out += (out.empty() ? "" : before) + *part;
  }
  return out;
}

ConfigError::ConfigError(std::string_view origin, std::vector<ConfigProblem> problems, std::size_t total)
    : Error(ErrorCode::kConfig, error_message(origin, problems, total), error_context(problems, total)),
      problems_(std::move(problems)) {}

std::array<double, 2> OptimizerConfig::moments() const {
  return betas.value_or(std::array{0.9, type == "Lion" ? 0.99 : 0.999});
}

double OptimizerConfig::decay() const {
  return weight_decay.value_or(type == "AdamW" ? 0.01 : 0.0);
}

std::string OptimizerConfig::rule() const {
  return type == "Adam" && adam_w_mode ? "AdamW" : type;
}

LearningRateSchedule SchedulerConfig::schedule() const {
  using Kind = LearningRateSchedule::Kind;
  LearningRateSchedule out;
  if (type.empty()) return out;
  out.warmup_steps = warmup_num_steps;
  out.total_steps = total_num_steps;
  out.logarithmic = warmup_type == "log";
  if (type == "WarmupCosineLR") {
    out.kind = Kind::kWarmupCosine;
    out.warmup_start = warmup_min_ratio;
    out.floor = cos_min_ratio;
  } else {
    out.kind = type == "WarmupDecayLR" ? Kind::kWarmupLinear : Kind::kWarmup;
    out.warmup_start = warmup_min_lr / warmup_max_lr;
  }
  return out;
}

double SchedulerConfig::base_lr(double optimizer_lr) const {
  return type == "WarmupLR" || type == "WarmupDecayLR" ? warmup_max_lr : optimizer_lr;
}

std::optional<DType> Config::input_dtype() const {
  if (fp16.enabled && fp16_auto_cast) return DType::kFloat16;
  if (bf16 && bf16_auto_cast) return DType::kBFloat16;
  return std::nullopt;
}

Config Config::from_file(const std::filesystem::path& path, std::span<const ConfigOverride> overrides) {
  return from_json_text(config::read_document(path), path.string(), overrides);
}

Config Config::from_json_text(std::string_view text, std::string_view origin,
                              std::span<const ConfigOverride> overrides) {
  config::Problems problems(origin);
  config::Document document = config::parse_document(text, problems);
  config::rename_aliases(document, problems);
  config::apply_overrides(document, overrides, problems);
  Config out = config::check_document(document, problems);
  problems.raise();
  std::erase_if(document.origins, [&document](const auto& entry) {
    return !config::is_given(document.root, Json::json_pointer{entry.first});
  });
  out.origins_ = std::move(document.origins);
  return out;
}

std::string Config::to_json() const {
  return write(*this, [](const KeySpec&) { return true; }).dump(2);
}

void Config::validate() const {
  constexpr std::string_view kOrigin = "the program's Config";
  // A value that to_json() leaves out because nothing would follow it is a request that cannot be honoured.
  config::Problems problems(kOrigin);
  const Config defaults;
  for (const KeySpec& key : config::honoured_keys()) {
    if (key.applies == nullptr || key.applies(*this) || key.write(*this) == key.write(defaults)) continue;
    problems.add({.pointer = std::string(key.pointer),
                  .origin = std::string(kOrigin),
                  .what = "the key has no meaning here",
                  .expected = {},
                  .got = key.write(*this).dump(),
                  .hint = "it belongs to " + std::string(key.applies_text)});
  }
  problems.raise();
  static_cast<void>(from_json_text(to_json(), kOrigin));
}

std::string Config::shared_json() const {
  return shared(*this).dump();
}

std::uint64_t Config::digest() const {
  return digest64(shared_json());
}

std::string Config::origin_of(std::string_view pointer) const {
  const auto at = origins_.find(pointer);
  return at == origins_.end() ? "default" : at->second;
}

std::vector<std::string> Config::describe() const {
  std::vector<std::string> lines;
  const Json flat = write(*this, [](const KeySpec&) { return true; });
  for (const KeySpec& key : config::honoured_keys()) {
    const Json::json_pointer at{std::string(key.pointer)};
    if (!flat.contains(at)) continue;
    lines.push_back(std::string(key.pointer) + " = " + flat.at(at).dump() + " (" + origin_of(key.pointer) + ")");
  }
  return lines;
}

bool Config::operator==(const Config& other) const {
  return to_json() == other.to_json();
}

std::vector<std::string> shared_differences(std::string_view here, std::string_view there) {
  const auto parse = [](std::string_view text) {
    Json root = Json::parse(text, nullptr, false);
    ZR_CHECK(root.is_object(), ErrorCode::kMismatch, "a peer sent a configuration that is no JSON object",
             {.where = "engine.config", .got = config::printable(text)});
    return root.flatten();
  };
  const Json mine = parse(here);
  const Json theirs = parse(there);
  std::vector<std::string> lines;
  const auto show = [](const Json& side, const std::string& pointer) {
    const auto at = side.find(pointer);
    return at == side.end() ? std::string("absent") : at->dump();
  };
  for (const auto& item : mine.items()) {
    if (show(theirs, item.key()) == item.value().dump()) continue;
    lines.push_back(item.key() + ": " + item.value().dump() + " here, " + show(theirs, item.key()) + " there");
  }
  for (const auto& item : theirs.items()) {
    if (mine.contains(item.key())) continue;
    lines.push_back(item.key() + ": absent here, " + item.value().dump() + " there");
  }
  return lines;
}

}  // namespace zeroth
