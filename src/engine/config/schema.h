// The schema of the configuration: one row a key. The checker, the writer and docs/configuration.md are made
// from it.
#pragma once

#include <zeroth/engine/config.h>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::config {

using Json = nlohmann::json;

enum class KeyClass : std::uint8_t { kHonoured, kHint, kRefused };

enum class KeyKind : std::uint8_t {
  kBool,
  kInteger,  ///< also 5e8 and 3.0: files are written by programs that know only doubles
  kNumber,
  kText,
  kChoice,      ///< one of `choices`, compared without case
  kNumberPair,  ///< [a, b], both within the bounds
  kSection,     ///< an object whose members are `members`, or any where `members` is empty
  kAny,
};

/// Closed bounds, or open where it says so.
struct Bounds {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_open = false;
  bool high_open = false;
};

/// A row. Lists in text are separated by '|'. Of every key null means absent; a hint takes any value.
struct KeySpec {
  std::string_view pointer{};
  KeyClass key_class = KeyClass::kHonoured;
  KeyKind kind = KeyKind::kBool;
  std::string_view text{};  ///< honoured: what it does; hint: what Zeroth does instead; refused: why
  std::string_view default_text{};
  Bounds bounds{};
  std::int64_t lowest = 0;                                 ///< of kInteger
  std::int64_t highest = std::numeric_limits<int>::max();  ///< of kInteger
  std::string_view choices{};
  std::string_view elsewhere{};       ///< choices that DeepSpeed has and Zeroth has not
  std::string_view choice_aliases{};  ///< "FusedAdam=Adam": other names of choices
  std::string_view members{};

  /// Refused keys: the values that ask for nothing, as JSON texts; or, for a section, conditions
  /// "member=value" of which each must hold (an absent member holds if the condition starts with '?').
  std::string_view off{};

  /// Honoured keys.
  bool shared = true;                        ///< must agree between ranks
  bool (*applies)(const Config&) = nullptr;  ///< null: always; else the key has a meaning only then
  std::string_view applies_text{};           ///< "optimizer AdamW and Adam"
  void (*read)(Config&, const Json&) = nullptr;
  Json (*write)(const Config&) = nullptr;  ///< null where the value is absent
};

/// Another name that DeepSpeed accepts for a key or section.
struct KeyAlias {
  std::string_view alias{};
  std::string_view pointer{};
};

[[nodiscard]] std::span<const KeySpec> honoured_keys();
[[nodiscard]] std::span<const KeySpec> hint_keys();
[[nodiscard]] std::span<const KeySpec> refused_keys();
[[nodiscard]] std::span<const KeyAlias> key_aliases();
/// All of them, honoured first.
[[nodiscard]] std::vector<const KeySpec*> all_keys();

/// The parts of a text list.
[[nodiscard]] std::vector<std::string> split_list(std::string_view list);
/// "AdamW, Adam or SGD".
[[nodiscard]] std::string or_list(const std::vector<std::string>& parts);
/// What a key takes, for messages and for the reference: "an integer of at least 1", "true or false".
[[nodiscard]] std::string expected_text(const KeySpec& key);

}  // namespace zeroth::config
