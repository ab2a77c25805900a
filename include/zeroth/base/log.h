// Logging: rank-prefixed lines through a value that is passed along; spdlog lives in src/base/log.cpp only.
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

/// A handle to one rank's log. Cheap to copy, safe from several threads. There is no global logger.
/// Rank 0 speaks about progress (`progress`), every rank about trouble (`warn`, `error`).
class Logger {
 public:
  /// Writes nothing.
  Logger();
  /// Lines go to stderr as "[zeroth rank/world] level: text".
  /// With `json_path` every line, whatever the level, and every record() is also appended to that file as one JSON
  /// object on a line of its own: "time" (UTC), "rank", "event" ("log" with "level" and "text", or the record's own),
  /// then the fields. All ranks of a host may append to one file. Throws kIo if it cannot be opened; a write that fails
  /// later is said once and ends the file.
  Logger(int rank, int world_size, LogLevel level = LogLevel::kInfo, const std::string& json_path = "");

  void debug(std::string_view text) const;
  /// Info from rank 0 only; other ranks stay quiet.
  void progress(std::string_view text) const;
  void warn(std::string_view text) const;
  void error(std::string_view text) const;
  /// A structured record, for the JSON log only. Numbers that are not finite are null there.
  void record(std::string_view event, std::initializer_list<LogField> fields) const;

 private:
  struct Sink;
  std::shared_ptr<Sink> sink_;
};

}  // namespace zeroth
