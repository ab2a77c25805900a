#include "engine/config/schema.h"

#include <cmath>

namespace zeroth::config {
namespace {

std::string number_text(double number) {
  return Json(number).dump();
}

std::string bounds_text(const Bounds& b) {
  std::string text;
  if (std::isfinite(b.low)) {
    text += b.low_open ? " above " : " of at least ";
    text += number_text(b.low);
  }
  if (std::isfinite(b.high)) {
    if (!text.empty()) text += " and";
    text += b.high_open ? " below " : " at most ";
    text += number_text(b.high);
  }
  return text;
}

std::string integer_text(const KeySpec& key) {
  constexpr std::int64_t kNoBound = std::int64_t{1} << 62;
  if (key.highest >= kNoBound) return "an integer of at least " + std::to_string(key.lowest);
  return "an integer from " + std::to_string(key.lowest) + " to " + std::to_string(key.highest);
}

std::string quoted_or_list(std::string_view list) {
  std::vector<std::string> parts = split_list(list);
  for (std::string& part : parts) part = "\"" + part + "\"";
  return or_list(parts);
}

// "?enabled=false;mode=1|2" -> "\"enabled\": false and \"mode\": 1 or 2".
std::string off_text(const KeySpec& key) {
  if (key.kind != KeyKind::kSection) return or_list(split_list(key.off));
  if (key.off.empty()) return "an empty object";
  std::string text;
  for (std::string_view rest = key.off; !rest.empty();) {
    const std::size_t end = std::min(rest.find(';'), rest.size());
    std::string_view condition = rest.substr(0, end);
    if (condition.starts_with('?')) condition.remove_prefix(1);
    const std::size_t equals = condition.find('=');
    if (!text.empty()) text += " and ";
    text += "\"" + std::string(condition.substr(0, equals)) + "\": ";
    text += or_list(split_list(condition.substr(equals + 1)));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return text;
}

}  // namespace

std::vector<const KeySpec*> all_keys() {
  std::vector<const KeySpec*> keys;
  for (const auto list : {honoured_keys(), hint_keys(), refused_keys()}) {
    for (const KeySpec& key : list) keys.push_back(&key);
  }
  return keys;
}

std::vector<std::string> split_list(std::string_view list) {
  std::vector<std::string> parts;
  while (!list.empty()) {
    const std::size_t end = std::min(list.find('|'), list.size());
    parts.emplace_back(list.substr(0, end));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return parts;
}

std::string or_list(const std::vector<std::string>& parts) {
  std::string text;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) text += i + 1 == parts.size() ? " or " : ", ";
    text += parts[i];
  }
  return text;
}

std::string expected_text(const KeySpec& key) {
  if (key.key_class == KeyClass::kRefused) return off_text(key);
  switch (key.kind) {
    case KeyKind::kBool:
      return "true or false";
    case KeyKind::kInteger:
      return integer_text(key);
    case KeyKind::kNumber:
      return "a number" + bounds_text(key.bounds);
    case KeyKind::kText:
      return "a text";
    case KeyKind::kChoice:
      return quoted_or_list(key.choices);
    case KeyKind::kNumberPair:
      return "two numbers, each" + bounds_text(key.bounds);
    case KeyKind::kSection:
      return "an object";
    case KeyKind::kAny:
      return "anything";
  }
  return {};
}

}  // namespace zeroth::config
