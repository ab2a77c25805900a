#include "engine/local_settings.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/shard/flat_layout.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <exception>

namespace zeroth {
namespace {

constexpr const char* kLocalWhere = "engine.local_updates";

using LocalJson = nlohmann::ordered_json;

[[noreturn]] void refuse_local(const std::string& what, const std::string& which, const std::string& expected,
                               const std::string& got, const std::string& hint = "") {
  throw Error(ErrorCode::kConfig, what,
              {.where = kLocalWhere, .which = which, .expected = expected, .got = got, .hint = hint});
}

constexpr std::array kMethods{LocalMethod::kAverage, LocalMethod::kCo2, LocalMethod::kNone};
constexpr std::array kPayloads{LocalPayload::kFull, LocalPayload::kInt8, LocalPayload::kInt4, LocalPayload::kFp4};

constexpr std::array kLost{LostSites::kEnd, LostSites::kLeave};

template <class Values>
auto value_named(const Values& values, std::string_view name, const char* what) {
  std::vector<std::string> names;
  for (const auto value : values) {
    if (name_of(value) == name) return value;
    names.emplace_back(name_of(value));
  }
  refuse_local(std::string("there is no such ") + what + " of local updates", what, join(names, ", "),
               std::string(name));
}

void require_number(const char* which, bool good, const char* expected, double got) {
  if (!good) refuse_local("local updates cannot be made with this number", which, expected, std::to_string(got));
}

}  // namespace

std::string_view name_of(LocalMethod method) noexcept {
  switch (method) {
    case LocalMethod::kAverage:
      return "average";
    case LocalMethod::kCo2:
      return "co2";
    case LocalMethod::kNone:
      return "none";
  }
  return "";
}

std::string_view name_of(LocalPayload payload) noexcept {
  switch (payload) {
    case LocalPayload::kFull:
      return "full";
    case LocalPayload::kInt8:
      return "int8";
    case LocalPayload::kInt4:
      return "int4";
    case LocalPayload::kFp4:
      return "fp4";
  }
  return "";
}

std::string_view name_of(LostSites lost) noexcept {
  return lost == LostSites::kLeave ? "leave" : "end";
}

LostSites lost_sites_of(std::string_view name) {
  return value_named(kLost, name, "lost_sites");
}

LocalMethod local_method_of(std::string_view name) {
  return value_named(kMethods, name, "method");
}

LocalPayload local_payload_of(std::string_view name) {
  return value_named(kPayloads, name, "payload");
}

void validate(const LocalSettings& settings, int num_units) {
  require_number("steps", settings.steps >= 1, "at least 1 step between two exchanges", settings.steps);
  if (settings.method == LocalMethod::kNone) {
    const LocalSettings plain{.method = LocalMethod::kNone, .steps = settings.steps};
    if (settings == plain) return;
    refuse_local("sites that exchange nothing have no outer update",
                 join(differences(text_of(plain), text_of(settings)), ", "),
                 "the defaults of all that is about exchanges with method none", "other values",
                 "leave them out, or choose another method");
  }
  require_number("outer_lr", std::isfinite(settings.outer_lr) && settings.outer_lr > 0, "a number above 0",
                 settings.outer_lr);
  require_number("outer_momentum", settings.outer_momentum >= 0 && settings.outer_momentum < 1, "from 0 to below 1",
                 settings.outer_momentum);
  require_number("keep_local", settings.keep_local >= 0 && settings.keep_local < 1, "from 0 to below 1",
                 settings.keep_local);
  require_number("block", settings.block > 0 && settings.block % 16 == 0 && kBlockElements % settings.block == 0,
                 "16, 32, 64, 128, 256, 512 or 1024", settings.block);
  require_number("gap_scale", std::isfinite(settings.gap_scale) && settings.gap_scale >= 0, "at least 0",
                 settings.gap_scale);
  require_number("clip", std::isfinite(settings.clip) && settings.clip >= 0, "at least 0", settings.clip);
  if (settings.fragments < 1 || settings.fragments > num_units) {
    refuse_local("a fragment has at least one unit with parameters that train", "fragments",
                 "1 to " + std::to_string(num_units) + ", the units of this model", std::to_string(settings.fragments));
  }
  if (settings.fragments > settings.steps) {
    refuse_local("fragments are exchanged in different steps of a window", "fragments",
                 "at most " + std::to_string(settings.steps) + ", the steps", std::to_string(settings.fragments));
  }
  if (settings.delay < 0 || settings.delay >= settings.steps) {
    refuse_local("an exchange is taken before the next one of the same fragment", "delay",
                 "0 to " + std::to_string(settings.steps - 1) + ", less than the steps", std::to_string(settings.delay),
                 "LocalMethod::kCo2 (\"co2\" in Python) takes it one window late");
  }
  if (settings.method == LocalMethod::kCo2) {
    const bool own = settings.fragments == 1 && settings.delay == 0 && settings.keep_local == 0;
    if (!own)
      refuse_local("CO2 exchanges the whole model, one window late", "fragments, delay, keep_local", "1, 0, 0",
                   std::to_string(settings.fragments) + ", " + std::to_string(settings.delay) + ", " +
                       std::to_string(settings.keep_local));
  } else {
    require_number("gap_scale", settings.gap_scale == 0, "0: it is of method co2", settings.gap_scale);
    require_number("clip", settings.clip == 0, "0: it is of method co2", settings.clip);
  }
}

std::string text_of(const LocalSettings& settings) {
  return LocalJson{{"method", name_of(settings.method)},
                   {"steps", settings.steps},
                   {"outer_lr", hex_float(settings.outer_lr)},
                   {"outer_momentum", hex_float(settings.outer_momentum)},
                   {"nesterov", settings.nesterov},
                   {"fragments", settings.fragments},
                   {"delay", settings.delay},
                   {"keep_local", hex_float(settings.keep_local)},
                   {"payload", name_of(settings.payload)},
                   {"block", settings.block},
                   {"gap_scale", hex_float(settings.gap_scale)},
                   {"clip", hex_float(settings.clip)},
                   {"lost_sites", name_of(settings.lost_sites)}}
      .dump();
}

std::vector<std::string> differences(std::string_view usual, std::string_view other) {
  const LocalJson ours = LocalJson::parse(usual);
  const LocalJson theirs = LocalJson::parse(other);
  std::vector<std::string> found;
  for (const auto& [key, value] : ours.items()) {
    if (!theirs.contains(key) || theirs.at(key) != value) found.push_back(key);
  }
  return found;
}

std::vector<std::string> window_differences(std::string_view usual, std::string_view other) {
  std::vector<std::string> found = differences(usual, other);
  constexpr std::array<std::string_view, 4> kOfWindows{"method", "steps", "fragments", "delay"};
  std::erase_if(found, [&](const std::string& key) { return std::ranges::find(kOfWindows, key) == kOfWindows.end(); });
  return found;
}

std::vector<int> offsets_of(const LocalSettings& settings) {
  std::vector<int> offsets;
  for (std::int64_t fragment = 0; fragment < settings.fragments; ++fragment)
    offsets.push_back(static_cast<int>(fragment * settings.steps / settings.fragments));
  return offsets;
}

std::int64_t last_exchange(const LocalSettings& settings, int offset, std::int64_t now) {
  if (now < offset) return -1;
  const std::int64_t step = now - (now - offset) % settings.steps;
  return step > 0 ? step : -1;
}

int most_under_way(const LocalSettings& settings) {
  if (settings.method == LocalMethod::kNone) return 0;
  const int apart = std::max(1, settings.steps / settings.fragments);
  return std::min(settings.fragments, std::max(1, (settings.delay + apart - 1) / apart));
}

std::string text_of(const SavedLocal& saved) {
  return LocalJson{{"settings", saved.settings}, {"begun", saved.begun}}.dump();
}

SavedLocal saved_local_of(const std::string& text, const std::string& where) {
  try {
    const LocalJson json = LocalJson::parse(text);
    SavedLocal saved{.settings = json.at("settings").get<std::string>(), .begun = json.at("begun").get<std::int64_t>()};
    (void)differences(saved.settings, saved.settings);
    return saved;
  } catch (const std::exception& error) {
    throw Error(ErrorCode::kCheckpoint, "a checkpoint says of local updates what cannot be",
                {.where = kLocalWhere, .which = where, .got = error.what()});
  }
}

}  // namespace zeroth
