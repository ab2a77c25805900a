#include "doctor/status_lines.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <iterator>
#include <utility>

namespace zeroth::doctor {
namespace {

using Json = nlohmann::json;

std::vector<Json> objects_of(std::string_view lines) {
  std::vector<Json> objects;
  while (!lines.empty()) {
    const std::string_view line = lines.substr(0, lines.find('\n'));
    lines.remove_prefix(std::min(lines.size(), line.size() + 1));
    Json object = Json::parse(line, nullptr, false);
    if (object.is_object()) objects.push_back(std::move(object));
  }
  return objects;
}

std::string text_in(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

}  // namespace

std::vector<Culprit> culprits_of(std::string_view lines) {
  std::vector<Culprit> refused;
  std::vector<Culprit> first;
  for (const Json& object : objects_of(lines)) {
    const std::string event = text_in(object, "event");
    const auto late = object.find("late");
    Culprit culprit{.host = text_in(object, "host"),
                    .text = text_in(object, "text"),
                    .late = late != object.end() && *late == true};
    if (culprit.host.empty()) continue;
    if (event == "host_refused")
      refused.push_back(std::move(culprit));
    else if (event == "first_cause")
      first.push_back(std::move(culprit));
  }
  return refused.empty() ? first : refused;
}

std::vector<Culprit> to_leave_out(const std::vector<Culprit>& culprits) {
  std::vector<Culprit> sure;
  std::ranges::copy_if(culprits, std::back_inserter(sure), [](const Culprit& one) { return !one.late; });
  return sure.empty() ? culprits : sure;
}

std::string end_of(std::string_view lines) {
  std::string text;
  for (const Json& object : objects_of(lines)) {
    if (text_in(object, "event") == "end") text = text_in(object, "text");
  }
  return text;
}

}  // namespace zeroth::doctor
