// A result as benchmarks/schema.json has it: what was measured, on which machine, by which command. Knows no
// torch.
#pragma once

#include "support/statistics.h"

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <vector>

namespace zeroth::benchmarks {

enum class Better { kLower, kHigher, kNone };

/// One number with its interval. `bar`: what the median is to reach.
struct Row {
  std::string name{};
  std::string unit{};
  Summary summary{};
  Better better = Better::kNone;
  std::optional<double> bar{};
};

/// Collects rows; knows the machine and notes its load when it is made and when it is written.
class Record {
 public:
  /// `benchmark` is "folder/name". The command is that of this process; `prefix` is put before it (the
  /// launcher).
  Record(std::string benchmark, int argc, const char* const* argv, const std::string& prefix = {});

  void setting(const std::string& name, nlohmann::json value) { settings_[name] = std::move(value); }
  void version(const std::string& name, const std::string& value) { versions_[name] = value; }
  void note(std::string text) { notes_.push_back(std::move(text)); }
  void add(Row row) { rows_.push_back(std::move(row)); }
  /// CPU seconds of all ranks of this job so far; what else the machine spent is foreign.
  void set_own_cpu_seconds(double seconds) { own_cpu_seconds_ = seconds; }

  /// The rows as a table for people.
  [[nodiscard]] std::string table() const;
  [[nodiscard]] nlohmann::ordered_json to_json() const;
  /// to_json() with a line for each row; text_of() in record.py is the same.
  [[nodiscard]] std::string text() const;
  /// Writes text() to `path`; nothing for an empty path. Throws std::runtime_error where that fails.
  void write(const std::string& path) const;

 private:
  std::string benchmark_;
  std::string command_;
  std::string date_;
  double load_before_;
  double busy_before_;
  std::optional<double> own_cpu_seconds_{};
  nlohmann::ordered_json settings_ = nlohmann::ordered_json::object();
  nlohmann::ordered_json versions_ = nlohmann::ordered_json::object();
  std::vector<Row> rows_{};
  std::vector<std::string> notes_{};
};

}  // namespace zeroth::benchmarks
