#include "support/record.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace zeroth::benchmarks {
namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

double load_average() {
  std::array<double, 1> load{};
  return ::getloadavg(load.data(), 1) == 1 ? load[0] : 0.0;
}

// Seconds that all cores together were not idle since the machine started.
double busy_seconds() {
  std::ifstream file("/proc/stat");
  std::string label;
  file >> label;
  double busy = 0.0;
  for (int field = 0; field < 8; ++field) {  // user nice system idle iowait irq softirq steal
    double ticks = 0.0;
    file >> ticks;
    if (field != 3 && field != 4) busy += ticks;
  }
  return busy / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

// Programs by their names: where they lie differs between machines.
std::string command_line(int argc, const char* const* argv, const std::string& prefix) {
  std::string text = prefix;
  for (int i = 0; i < argc; ++i) {
    std::string word = argv[i];
    if (i == 0) word = word.substr(word.rfind('/') + 1);
    text += (text.empty() ? "" : " ") + word;
  }
  return text;
}

std::string_view name_of(Better better) {
  switch (better) {
    case Better::kLower:
      return "lower";
    case Better::kHigher:
      return "higher";
    case Better::kNone:
      return "none";
  }
  return "";
}

nlohmann::ordered_json machine(double load_before) {
  utsname system{};
  ::uname(&system);
  const double memory = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGE_SIZE));
  return {{"cpu", cpu_model()},
          {"cores", ::sysconf(_SC_NPROCESSORS_ONLN)},
          {"memory_gib", memory / static_cast<double>(1ULL << 30U)},
          {"kernel", system.release},
          {"load_before", load_before},
          {"load_after", load_average()}};
}

/// On one line, with the spaces of Python's json.
std::string line_of(const nlohmann::ordered_json& value) {
  if (!value.is_structured()) return value.dump();
  std::string text;
  for (const auto& [key, item] : value.items()) {
    if (!text.empty()) text += ", ";
    text += (value.is_object() ? nlohmann::json(key).dump() + ": " : "") + line_of(item);
  }
  return value.is_object() ? "{" + text + "}" : "[" + text + "]";
}

/// A line for each member; `value` is an object or an array.
std::string lines_of(const nlohmann::ordered_json& value) {
  std::string text;
  for (const auto& [key, item] : value.items()) {
    text += text.empty() ? "\n    " : ",\n    ";
    text += (value.is_object() ? nlohmann::json(key).dump() + ": " : "") + line_of(item);
  }
  if (!text.empty()) text += "\n  ";
  return value.is_object() ? "{" + text + "}" : "[" + text + "]";
}

}  // namespace

Record::Record(std::string benchmark, int argc, const char* const* argv, const std::string& prefix)
    : benchmark_(std::move(benchmark)),
      command_(command_line(argc, argv, prefix)),
      date_(utc_now()),
      load_before_(load_average()),
      busy_before_(busy_seconds()) {
  versions_["compiler"] = "g++ " __VERSION__;
}

std::string Record::table() const {
  std::size_t width = 4;
  for (const Row& row : rows_) width = std::max(width, row.name.size());
  std::string text;
  for (const Row& row : rows_) {
    std::array<char, 200> line{};
    std::snprintf(line.data(), line.size(), "%-*s %10.3f %-6s [%.3f, %.3f] of %zu", static_cast<int>(width),
                  row.name.c_str(), row.summary.median, row.unit.c_str(), row.summary.low, row.summary.high,
                  row.summary.samples);
    text += line.data();
    if (row.bar) {
      std::snprintf(line.data(), line.size(), "  bar %g", *row.bar);
      text += line.data();
    }
    text += '\n';
  }
  for (const std::string& line : notes_) text += "note: " + line + '\n';
  return text;
}

nlohmann::ordered_json Record::to_json() const {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Row& row : rows_) {
    nlohmann::ordered_json entry = {{"name", row.name},
                                    {"unit", row.unit},
                                    {"median", row.summary.median},
                                    {"low", row.summary.low},
                                    {"high", row.summary.high},
                                    {"samples", std::max<std::size_t>(1, row.summary.samples)},
                                    {"better", name_of(row.better)}};
    if (row.bar) entry["bar"] = *row.bar;
    rows.push_back(std::move(entry));
  }
  nlohmann::ordered_json where = machine(load_before_);
  if (own_cpu_seconds_) {
    where["foreign_cpu_seconds"] = std::max(0.0, busy_seconds() - busy_before_ - *own_cpu_seconds_);
  }
  return {{"schema", 1},           {"benchmark", benchmark_},     {"date", date_},
          {"command", command_},   {"machine", std::move(where)}, {"versions", versions_},
          {"settings", settings_}, {"rows", std::move(rows)},     {"notes", notes_}};
}

std::string Record::text() const {
  const nlohmann::ordered_json result = to_json();
  std::string text = "{";
  for (const auto& [name, value] : result.items()) {
    text += text.size() == 1 ? "\n  " : ",\n  ";
    text += nlohmann::json(name).dump() + ": " + (value.is_structured() ? lines_of(value) : value.dump());
  }
  return text + "\n}\n";
}

void Record::write(const std::string& path) const {
  if (path.empty()) return;
  std::ofstream file(path, std::ios::trunc);
  file << text();
  file.flush();
  if (!file) throw std::runtime_error("cannot write " + path);
}

}  // namespace zeroth::benchmarks
