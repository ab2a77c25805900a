#include "engine/config/check.h"

#include <zeroth/base/text.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cmath>
#include <functional>
#include <map>
#include <set>

namespace zeroth::config {
namespace {

bool same_without_case(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) == std::tolower(static_cast<unsigned char>(y));
  });
}

bool equals_any(const Json& value, std::string_view json_list) {
  const std::vector<std::string> texts = split_list(json_list);
  return std::any_of(texts.begin(), texts.end(), [&value](const std::string& text) {
    return value == Json::parse(text);  // 1 equals 1.0, and true does not
  });
}

// Sections of techniques, each with its own switch: nothing is asked for if every switch is off.
bool asks_for_nothing(const Json& value) {
  if (value.is_null() || value == false) return true;
  if (!value.is_object()) return false;
  if (const auto at = value.find("enabled"); at != value.end() && !at->is_null()) return *at == false;
  if (const auto at = value.find("shared_parameters"); at != value.end()) return asks_for_nothing(*at);
  return std::all_of(value.begin(), value.end(), [](const Json& member) { return asks_for_nothing(member); });
}

bool holds(std::string_view condition, const Json& section) {
  const bool absent_is_fine = condition.starts_with('?');
  if (absent_is_fine) condition.remove_prefix(1);
  const std::size_t equals = condition.find('=');
  const auto member = section.find(std::string(condition.substr(0, equals)));
  if (member == section.end() || member->is_null()) return absent_is_fine;
  return equals_any(*member, condition.substr(equals + 1));
}

// The value of an honoured key as it is read, or null and a problem.
class ValueCheck {
 public:
  ValueCheck(const KeySpec& key, const Json& value) : key_(key), value_(value) {}

  [[nodiscard]] bool good() const {
    switch (key_.kind) {
      case KeyKind::kBool:
        return value_.is_boolean();
      case KeyKind::kInteger:
        return is_integer();
      case KeyKind::kNumber:
        return value_.is_number() && is_within(value_.get<double>());
      case KeyKind::kText:
        return value_.is_string();
      case KeyKind::kChoice:
        return value_.is_string() && !choice().empty();
      case KeyKind::kNumberPair:
        return value_.is_array() && value_.size() == 2 &&
               std::all_of(value_.begin(), value_.end(),
                           [this](const Json& part) { return part.is_number() && is_within(part.get<double>()); });
      case KeyKind::kSection:
        return value_.is_object();
      case KeyKind::kAny:
        return true;
    }
    return false;
  }
  [[nodiscard]] Json canonical() const {
    if (key_.kind == KeyKind::kInteger) {
      return value_.is_number_float() ? Json(static_cast<std::int64_t>(value_.get<double>())) : value_;
    }
    return key_.kind == KeyKind::kChoice ? Json(choice()) : value_;
  }

 private:
  [[nodiscard]] bool is_integer() const {
    if (value_.is_number_unsigned()) {
      const auto number = value_.get<std::uint64_t>();
      return number <= static_cast<std::uint64_t>(key_.highest) && static_cast<std::int64_t>(number) >= key_.lowest;
    }
    if (value_.is_number_integer()) {
      const auto number = value_.get<std::int64_t>();
      return number >= key_.lowest && number <= key_.highest;
    }
    if (!value_.is_number_float()) return false;
    constexpr double kExact = 9007199254740992.0;  // 2^53: above, a double no longer says which integer was meant
    const double number = value_.get<double>();
    return std::trunc(number) == number && std::abs(number) <= kExact &&
           static_cast<std::int64_t>(number) >= key_.lowest && static_cast<std::int64_t>(number) <= key_.highest;
  }
  [[nodiscard]] bool is_within(double number) const {
    const Bounds& b = key_.bounds;
    return std::isfinite(number) && (b.low_open ? number > b.low : number >= b.low) &&
           (b.high_open ? number < b.high : number <= b.high);
  }
  [[nodiscard]] std::string choice() const {
    const auto& given = value_.get_ref<const std::string&>();
    for (const std::string& name : split_list(key_.choices)) {
      if (same_without_case(name, given)) return name;
    }
    for (const std::string& alias : split_list(key_.choice_aliases)) {
      const std::size_t equals = alias.find('=');
      if (same_without_case(std::string_view(alias).substr(0, equals), given)) return alias.substr(equals + 1);
    }
    return {};
  }

  const KeySpec& key_;
  const Json& value_;
};

std::string last_name(std::string_view pointer) {
  return std::string(pointer.substr(pointer.rfind('/') + 1));
}

class Checker {
 public:
  Checker(const Document& document, Problems& problems) : document_(document), problems_(problems) {
    for (const KeySpec* key : all_keys()) {
      keys_.emplace(key->pointer, key);
      for (std::size_t at = key->pointer.rfind('/'); at != 0; at = key->pointer.rfind('/', at - 1)) {
        sections_.insert(key->pointer.substr(0, at));
      }
    }
  }

  Config run() {
    walk(document_.root, "");
    for (const KeySpec* key : given_) {
      const std::string_view section = key->pointer.substr(0, key->pointer.find('/', 1));
      if (problems_.touches(std::string(section) + "/type")) continue;
      if (section == "/scheduler" && config_.scheduler.type.empty()) continue;  // check_together() asks for the type
      if (key->applies != nullptr && !key->applies(config_)) {
        add(key->pointer, "the key has no meaning here",
            std::string("it belongs to ") + std::string(key->applies_text));
      }
    }
    return std::move(config_);
  }

 private:
  void walk(const Json& section, const std::string& pointer) {
    for (const auto& [name, value] : section.items()) {
      const std::string child = child_pointer(pointer, name);
      if (const auto key = keys_.find(child); key != keys_.end()) {
        check(*key->second, value);
      } else if (sections_.contains(child)) {
        if (value.is_object()) {
          walk(value, child);
        } else if (!value.is_null()) {
          add(child, "wrong type", {}, "an object", printable(shown(value)));
        }
      } else {
        unknown(child, pointer, name);
      }
    }
  }

  void check(const KeySpec& key, const Json& value) {
    if (value.is_null()) return;
    if (key.key_class == KeyClass::kRefused) return check_refused(key, value);
    if (key.key_class == KeyClass::kHint) return take_hint(key, value);
    if (value == "auto") {
      return add(key.pointer, "\"auto\" is left over",
                 "the trainer that writes \"auto\" fills it in before it makes the engine; give a value here, or "
                 "override the key",
                 expected_text(key), "\"auto\"");
    }
    const ValueCheck checked(key, value);
    if (!checked.good()) return wrong_value(key, value);
    if (key.kind == KeyKind::kSection && !check_members(key, value)) return;
    key.read(config_, checked.canonical());
    given_.push_back(&key);
  }

  /// Whatever is asked for, it changes nothing; but a name that a section has not is a slip.
  void take_hint(const KeySpec& key, const Json& value) {
    if (key.kind == KeyKind::kSection && value.is_object() && !check_members(key, value)) return;
    config_.hints.push_back({.pointer = std::string(key.pointer),
                             .given = printable(shown(value)),
                             .instead = std::string(key.text),
                             .origin = document_.origin_of(key.pointer, problems_.origin())});
  }

  void wrong_value(const KeySpec& key, const Json& value) {
    std::string hint;
    if (key.kind == KeyKind::kChoice && value.is_string()) {
      const auto& given = value.get_ref<const std::string&>();
      const std::vector<std::string> elsewhere = split_list(key.elsewhere);
      const bool known = std::any_of(elsewhere.begin(), elsewhere.end(),
                                     [&given](const std::string& name) { return same_without_case(name, given); });
      if (known) {
        hint = given + " is not built";
      } else if (const std::string near = nearest(given, split_list(key.choices)); !near.empty()) {
        hint = "did you mean \"" + near + "\"?";
      }
    } else if (value.is_string()) {
      hint = "without quotation marks";
    }
    add(key.pointer, "wrong value", std::move(hint), expected_text(key), printable(shown(value)));
  }

  void check_refused(const KeySpec& key, const Json& value) {
    if (key.kind == KeyKind::kSection) {
      if (!value.is_object() && !is_off(key, value)) {
        return add(key.pointer, "wrong type", {}, "an object", printable(shown(value)));
      }
      if (value.is_object() && !check_members(key, value)) return;
    }
    if (is_off(key, value)) return;
    add(key.pointer, "Zeroth cannot do this", std::string(key.text), expected_text(key) + ", or leave the key out",
        printable(shown(value)));
  }

  // Members of sections that are checked as a whole: only their names are known.
  bool check_members(const KeySpec& key, const Json& section) {
    const std::vector<std::string> members = split_list(key.members);
    bool good = true;
    for (const auto& item : section.items()) {
      if (members.empty() || std::find(members.begin(), members.end(), item.key()) != members.end()) continue;
      unknown(child_pointer(key.pointer, item.key()), std::string(key.pointer), item.key(), members);
      good = false;
    }
    return good;
  }

  void unknown(const std::string& pointer, const std::string& parent, const std::string& name,
               std::vector<std::string> siblings = {}) {
    std::string hint;
    if (problems_.lists_next()) {
      if (siblings.empty()) siblings = names_under(parent);
      if (const std::string near = nearest(name, siblings); !near.empty()) {
        hint = "did you mean \"" + near + "\"?";
      } else if (const std::string elsewhere = same_name_elsewhere(name); !elsewhere.empty()) {
        hint = "there is " + elsewhere;
      }
    }
    add(pointer, "unknown key", std::move(hint));
  }

  [[nodiscard]] static std::string nearest(const std::string& name, const std::vector<std::string>& candidates) {
    constexpr std::size_t kLongestName = 128;  // the search takes the product of the lengths
    return name.size() > kLongestName ? std::string() : nearest_name(name, candidates);
  }
  [[nodiscard]] std::vector<std::string> names_under(const std::string& parent) const {
    std::set<std::string> names;
    const auto add_name = [&](std::string_view pointer) {
      if (pointer.size() <= parent.size() || !pointer.starts_with(parent + "/")) return;
      const std::string_view rest = pointer.substr(parent.size() + 1);
      names.emplace(rest.substr(0, rest.find('/')));
    };
    for (const auto& entry : keys_) add_name(entry.first);
    for (const KeyAlias& alias : key_aliases()) add_name(alias.alias);
    return {names.begin(), names.end()};
  }
  [[nodiscard]] std::string same_name_elsewhere(const std::string& name) const {
    for (const auto& entry : keys_) {
      if (last_name(entry.first) == name) return std::string(entry.first);
    }
    return {};
  }

  void add(std::string_view pointer, std::string what, std::string hint = {}, std::string expected = {},
           std::string got = {}) {
    problems_.add({.pointer = printable(pointer, 160),
                   .origin = document_.origin_of(pointer, problems_.origin()),
                   .what = std::move(what),
                   .expected = std::move(expected),
                   .got = std::move(got),
                   .hint = std::move(hint)});
  }

  const Document& document_;
  Problems& problems_;
  std::map<std::string_view, const KeySpec*> keys_{};
  std::set<std::string_view> sections_{};
  std::vector<const KeySpec*> given_{};
  Config config_{};
};

// pointer, what, expected, got, hint
using AddProblem = std::function<void(const char*, std::string, std::string, std::string, std::string)>;

void check_optimizer(const OptimizerConfig& optimizer, const AddProblem& add) {
  const LambOptions& lamb = optimizer.lamb;
  const auto check_limits = [&add](const char* pointer, double lowest, double highest) {
    if (lowest <= highest) return;
    add(pointer, "a lower limit above its upper one", "at most " + Json(highest).dump(), Json(lowest).dump(), {});
  };
  check_limits("/optimizer/params/min_coeff", lamb.min_coeff, lamb.max_coeff);
  check_limits("/optimizer/params/factor_min", lamb.factor_min, lamb.factor_max);
  if (optimizer.nesterov && (optimizer.momentum <= 0.0 || optimizer.dampening != 0.0)) {
    add("/optimizer/params/nesterov", "Nesterov momentum needs momentum and no dampening",
        "momentum > 0 and dampening 0",
        "momentum " + Json(optimizer.momentum).dump() + " and dampening " + Json(optimizer.dampening).dump(), {});
  }
}

void check_loss_scale(const LossScaling& fp16, const AddProblem& add) {
  const double first = std::ldexp(1.0, fp16.initial_power);
  if (!fp16.is_dynamic() || fp16.min_scale <= first) return;
  add("/fp16/min_loss_scale", "the smallest loss scale is above the first one", "at most " + Json(first).dump(),
      Json(fp16.min_scale).dump(), "the first scale is 2 to the power of initial_scale_power");
}

void check_scheduler(const SchedulerConfig& scheduler, bool warmup_given, const AddProblem& add) {
  const bool has_rates = scheduler.type == "WarmupLR" || scheduler.type == "WarmupDecayLR";
  if (has_rates && scheduler.warmup_min_lr > scheduler.warmup_max_lr) {
    add("/scheduler/params/warmup_min_lr", "the warmup begins above its end",
        "at most warmup_max_lr = " + Json(scheduler.warmup_max_lr).dump(), Json(scheduler.warmup_min_lr).dump(),
        "warmup_max_lr is 0.001 where it is not given");
  }
  if (scheduler.type != "WarmupDecayLR" && scheduler.type != "WarmupCosineLR") return;
  if (scheduler.total_num_steps == 0) {
    add("/scheduler/params/total_num_steps", "the key is missing", "an integer", {}, scheduler.type + " needs it");
  } else if (scheduler.total_num_steps < scheduler.warmup_num_steps) {
    add("/scheduler/params/total_num_steps", "the warmup is longer than the run",
        "at least warmup_num_steps = " + std::to_string(scheduler.warmup_num_steps),
        std::to_string(scheduler.total_num_steps),
        warmup_given ? "" : "warmup_num_steps is 1000 where it is not given");
  }
}

/// Whether an update can begin inside backward; the engine refuses the same (require_possible()).
void check_update(const Config& config, const AddProblem& add) {
  if (config.update.round_sums && config.fp16.enabled) {
    add("/zeroth/update/round_sums", "sums in float16 may overflow after they were found finite", "false, or bf16",
        "true, and fp16.enabled", "train in bf16, or leave out round_sums");
  }
  if (!config.update.inside_backward) return;
  constexpr const char* kKey = "/zeroth/update/inside_backward";
  if (config.update.delayed_after) {
    add(kKey, "an update cannot be inside its own backward and inside the next one", "one of both",
        "true, and delayed_after = " + std::to_string(*config.update.delayed_after), "leave out one of the two keys");
  }
  if (config.gradient_clipping > 0 && config.update.clip_by == "exact_norm") {
    add(kKey, "clipping by the exact norm starts the update with the verdict", "no gradient_clipping", "true",
        "set zeroth.update.clip_by to previous_norm, or leave out one of the keys");
  }
  if (config.fp16.is_dynamic()) {
    add(kKey, "a loss scale that adapts lives from steps that are skipped", "a step that is committed", "true",
        "set fp16.loss_scale to one that stays, or train in bf16");
  }
}

void check_degrees(const ZeroConfig& zero, const AddProblem& add) {
  const bool hpz = zero.hpz_partition_size > 1;
  const bool mics = zero.mics_shard_size > 0;
  if (zero.mics_shard_size == 0)
    add("/zero_optimization/mics_shard_size", "wrong value", "-1, or an integer of at least 1", "0", {});
  if (hpz && mics) {
    add("/zero_optimization/mics_shard_size", "two keys say over how many ranks states are split", "-1",
        std::to_string(zero.mics_shard_size), "zero_hpz_partition_size is set as well");
  }
  for (const auto& [pointer, degree] : {std::pair{"/zeroth/parameter_degree", zero.parameter_degree},
                                        {"/zeroth/optimizer_degree", mics ? zero.optimizer_degree : 0}}) {
    if (degree == 0 || !(hpz || mics)) continue;
    add(pointer, "two keys say over how many ranks states are split", "0", std::to_string(degree),
        std::string(hpz ? "zero_hpz_partition_size" : "mics_shard_size") + " is set as well");
  }
  const int parameter = hpz ? zero.hpz_partition_size : zero.parameter_degree;
  if (zero.stage == 3 && zero.optimizer_degree > 0 && !mics &&
      (parameter == 0 || zero.optimizer_degree % parameter != 0)) {
    add("/zeroth/optimizer_degree", "the optimizer is split over other groups than the parameters",
        parameter == 0 ? "a parameter_degree that divides it" : "a multiple of " + std::to_string(parameter),
        std::to_string(zero.optimizer_degree), {});
  }
  for (const int other :
       {mics ? zero.mics_shard_size : parameter, mics ? zero.mics_shard_size : zero.optimizer_degree}) {
    const int degree = zero.gradient_degree;
    if (degree == 0 || other <= 0 || degree % other == 0 || other % degree == 0) continue;
    add("/zeroth/gradient_degree", "gradients are summed in other groups than states are split over",
        "a divisor or a multiple of " + std::to_string(other), std::to_string(degree), {});
    break;
  }
}

void check_codes(const Config& config, const AddProblem& add) {
  const ZeroConfig& zero = config.zero;
  if (!zero.has_codes()) return;
  if (zero.code_bits != 4 && zero.code_bits != 8)
    add("/zeroth/codes/gradient_bits", "wrong value", "4 or 8", std::to_string(zero.code_bits), {});
  if (std::popcount(static_cast<unsigned>(zero.code_block)) != 1)
    add("/zeroth/codes/block", "wrong value", "a power of 2", std::to_string(zero.code_block), {});
  if (zero.code_node_degree > 0 && zero.hpz_partition_size > 1)
    add("/zeroth/codes/node_degree", "two keys say how many ranks a node has", "0",
        std::to_string(zero.code_node_degree), "zero_hpz_partition_size is set as well");
  if (zero.quantized_gradients && zero.code_feedback && config.fp16.is_dynamic())
    add("/zeroth/codes/feedback", "errors of gradients are kept under a loss scale that adapts", "false", "true",
        "set fp16.loss_scale to one that stays, or train in bf16");
}

/// Names under which DeepSpeed has another rule than torch: said once.
void note_what_adam_means(Config& config, const Document& document, const std::string& origin) {
  const auto given = [&document](const char* pointer) {
    const Json::json_pointer at{pointer};
    return document.root.contains(at) ? document.root.at(at) : Json();
  };
  const auto note = [&](const char* pointer, const Json& value, const char* instead) {
    config.hints.push_back({.pointer = pointer,
                            .given = printable(shown(value)),
                            .instead = instead,
                            .origin = document.origin_of(pointer, origin)});
  };
  const Json type = given("/optimizer/type");
  const Json mode = given("/optimizer/params/adam_w_mode");
  if (config.optimizer.type == "Adam" && type.is_string() && (type != "Adam" || mode.is_null())) {
    note("/optimizer/type", type,
         config.optimizer.adam_w_mode ? "Adam with decoupled weight decay (the rule of AdamW), as in DeepSpeed; "
                                        "adam_w_mode = false adds the decay "
                                        "to the gradient, as torch.optim.Adam does"
                                      : "Adam with the weight decay added to the gradient, as torch.optim.Adam does");
  }
  if (config.optimizer.type == "AdamW" && mode == false) {
    note("/optimizer/params/adam_w_mode", mode,
         "type AdamW decouples the weight decay all the same, as in DeepSpeed; with type Adam the key has an effect");
  }
}

/// Several of the folders that a text names are one.
bool names_one_twice(const std::string& folders) {
  std::set<std::string> seen;
  for (std::size_t begin = 0; begin <= folders.size();) {
    const std::size_t end = std::min(folders.find(':', begin), folders.size());
    if (end > begin && !seen.insert(folders.substr(begin, end - begin)).second) return true;
    begin = end + 1;
  }
  return false;
}

/// Keys that have no effect beside the others: said once.
void note_without_effect(Config& config, const Document& document, const std::string& origin) {
  const auto note = [&](bool applies, const char* pointer, const char* instead) {
    const Json::json_pointer at{pointer};
    if (!applies || !is_given(document.root, at)) return;
    config.hints.push_back({.pointer = pointer,
                            .given = printable(shown(document.root.at(at))),
                            .instead = instead,
                            .origin = document.origin_of(pointer, origin)});
  };
  constexpr const char* kOptimizer = "/zero_optimization/offload_optimizer/nvme_path";
  constexpr const char* kParameters = "/zero_optimization/offload_param/nvme_path";
  constexpr const char* kTwice = "a folder is named twice: that is one disk, and no more bandwidth";
  const OffloadConfig& offload = config.offload;
  const bool optimizer = offload.optimizer_device == "nvme";
  const bool parameters = offload.parameter_device == "nvme";
  note(!optimizer && !parameters && !offload.nvme_path.empty(), kOptimizer,
       "no effect: device \"nvme\" puts states into files");
  note(!parameters && !offload.parameter_nvme_path.empty(), kParameters,
       "no effect: device \"nvme\" puts parameters into files");
  note(!optimizer && offload.ratio != 1.0, "/zero_optimization/offload_optimizer/ratio",
       "no effect: it is a share of states in files");
  note(config.gradient_clipping == 0 && config.update.clip_by == "previous_norm", "/zeroth/update/clip_by",
       "no effect: gradient_clipping is 0");
  note(names_one_twice(offload.nvme_path), kOptimizer, kTwice);
  note(names_one_twice(offload.parameter_nvme_path), kParameters, kTwice);
}

}  // namespace

Config check_document(const Document& document, Problems& problems) {
  Config config = Checker(document, problems).run();
  check_together(config, document, problems);
  note_what_adam_means(config, document, problems.origin());
  note_without_effect(config, document, problems.origin());
  return config;
}

bool is_off(const KeySpec& key, const Json& value) {
  if (key.kind != KeyKind::kSection) return equals_any(value, key.off);
  if (key.off.empty() || !value.is_object()) return asks_for_nothing(value);
  for (std::string_view rest = key.off; !rest.empty();) {
    const std::size_t end = std::min(rest.find(';'), rest.size());
    if (!holds(rest.substr(0, end), value)) return false;
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return true;
}

void check_together(const Config& config, const Document& document, Problems& problems) {
  const auto given = [&document](std::string_view pointer) {
    const Json::json_pointer at{std::string(pointer)};
    return is_given(document.root, at);
  };
  const AddProblem add = [&](const char* pointer, std::string what, std::string expected, std::string got,
                             std::string hint) {
    problems.add({.pointer = pointer,
                  .origin = document.origin_of(pointer, problems.origin()),
                  .what = std::move(what),
                  .expected = std::move(expected),
                  .got = std::move(got),
                  .hint = std::move(hint)});
  };
  if (config.bf16 && config.fp16.enabled) {
    add("/fp16/enabled", "bf16 and fp16 are both enabled", "one of them", "both", "bf16 needs no loss scale");
  }
  if (config.offload.ratio_from == "planned" &&
      config.offload.ratio != 1.0) {  // 1 is written out where it is not given
    add("/zeroth/offload/ratio", "two keys say which share of the states is in files", "given",
        "planned, beside offload_optimizer.ratio " + Json(config.offload.ratio).dump(),
        "leave out offload_optimizer.ratio");
  }
  if (!problems.touches("/zeroth")) check_update(config, add);
  if (!problems.touches("/fp16")) check_loss_scale(config.fp16, add);
  if (!problems.touches("/optimizer")) check_optimizer(config.optimizer, add);
  if (!problems.touches("/zero_optimization") && !problems.touches("/zeroth")) check_degrees(config.zero, add);
  if (!problems.touches("/zero_optimization") && !problems.touches("/zeroth")) check_codes(config, add);
  if (!problems.touches("/scheduler")) {
    const std::span<const KeySpec> keys = honoured_keys();
    const bool has_params = std::any_of(keys.begin(), keys.end(), [&given](const KeySpec& key) {
      return key.pointer.starts_with("/scheduler/params/") && given(key.pointer);
    });
    if (config.scheduler.type.empty() && has_params) {
      add("/scheduler", "there are params but no type", "a type", {}, "set scheduler.type, say \"WarmupCosineLR\"");
    }
    check_scheduler(config.scheduler, given("/scheduler/params/warmup_num_steps"), add);
  }
}

}  // namespace zeroth::config
