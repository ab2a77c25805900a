// Logging: lines with a rank prefix, through a Logger value. Only src/base/log.cpp uses spdlog.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <variant>

namespace zeroth {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

/// One value of a structured record.
struct LogField {
  std::string_view name{};
  std::variant<bool, std::int64_t, double, std::string_view> value{};
};

/// A handle to one rank's log. Cheap to copy, thread safe. There is no global logger. Rank 0 logs progress
/// (`progress`); every rank logs problems (`warn`, `error`).
class Logger {
 public:
  /// Writes nothing.
  Logger();
  /// Lines go to stderr as "[zeroth rank/world] level: text".
  /// With `json_path` every line, whatever the level, and every record() is also appended to that file as one JSON
  /// object on a line of its own: "time" (UTC), "rank", "event" ("log" with "level" and "text", or the record's own),
  /// then the fields. All ranks of a host may append to one file. Throws kIo if the file cannot be opened. A later
  /// failed write is reported once and ends the JSON log.
  Logger(int rank, int world_size, LogLevel level = LogLevel::kInfo, const std::string& json_path = "");

  void debug(std::string_view text) const;
  /// An info line on rank 0; does nothing on other ranks.
  void progress(std::string_view text) const;
  void warn(std::string_view text) const;
  void error(std::string_view text) const;
  /// A structured record, for the JSON log only. Non-finite numbers become null.
  void record(std::string_view event, std::initializer_list<LogField> fields) const;

 private:
  struct Sink;
  std::shared_ptr<Sink> sink_;
};

}  // namespace zeroth
